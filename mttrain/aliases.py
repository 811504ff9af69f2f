"""What other trainers call our settings, for "did you mean" where one of their names is written."""

from __future__ import annotations

OTHER_NAMES = {
    other: name
    for name, others in {
        "run_dir": "output_dir model_dir save_dir save_model",
        "seed": "random_seed",
        "threads": "cpu_threads",
        "data.source_lang": "src_lang",
        "data.target_lang": "tgt_lang",
        "data.max_length": "max_len max_seq_len src_seq_length tgt_seq_length max_sent_length",
        "data.train": "trainpref train_sets",
        "data.valid": "validpref valid_sets dev",
        "data.test": "testpref",
        "data.temperature": "sampling_temperature sample_temperature temperature_sampling",
        "data.train.source": "path_src",
        "data.train.target": "path_tgt",
        "data.train.tag": "src_prefix encoder_langtok langtok",
        "data.workers": "num_workers dataloader_num_workers",
        "tokenizer.vocab_size": (
            "vocab src_vocab_size tgt_vocab_size voc_limit voc_min_freq vocabs dim_vocabs"
        ),
        "tokenizer.shared": "joined_dictionary share_vocab",
        "tokenizer.level": "tokenizer_type",
        "model.d_model": (
            "hidden_size embedding_size emb_dim encoder_embed_dim decoder_embed_dim rnn_size "
            "word_vec_size embedding_dim dim_emb"
        ),
        "model.d_ff": (
            "ff_size ffn_dim encoder_ffn_embed_dim decoder_ffn_embed_dim encoder_ffn_dim "
            "decoder_ffn_dim transformer_ff transformer_dim_ffn"
        ),
        "model.num_heads": (
            "heads n_heads nhead encoder_attention_heads decoder_attention_heads transformer_heads"
        ),
        "model.encoder_layers": "layers num_layers n_layers enc_layers enc_depth",
        "model.tie": (
            "share_embeddings tied_embeddings share_all_embeddings "
            "share_decoder_input_output_embed share_decoder_embeddings tied_softmax "
            "tied_embeddings_all"
        ),
        "model.decoder_layers": "dec_layers dec_depth",
        "model.dropout": "transformer_dropout",
        "model.attention_dropout": "transformer_dropout_attention",
        "model.word_dropout": "token_dropout dropout_src dropout_trg embedding_dropout",
        "model.scale_embedding": "scale_embeddings",
        "model.activation_dropout": "relu_dropout transformer_dropout_ffn",
        "model.activation": (
            "activation_fn pos_ffn_activation_fn transformer_ffn_activation activation_function"
        ),
        "model.norm": (
            "encoder_normalize_before decoder_normalize_before layer_norm "
            "transformer_preprocess transformer_postprocess"
        ),
        "model.positions": (
            "encoder_learned_pos decoder_learned_pos position_encoding "
            "transformer_train_position_embeddings"
        ),
        "model.layer_norm_eps": "norm_eps",
        "optim": "optimizer",
        "optim.lr": "learning_rate max_lr learning_rate_peak learn_rate",
        "optim.warmup_steps": "warmup warmup_updates learning_rate_warmup lr_warmup",
        "optim.clip_norm": "clip grad_clip max_grad_norm clip_grad_norm",
        "optim.betas": "adam_betas adam_beta1 adam_beta2 optimizer_params",
        "optim.eps": "adam_eps adam_epsilon",
        "optim.schedule": (
            "lr_scheduler lr_scheduler_type decay_method scheduling lr_decay_inv_sqrt"
        ),
        "optim.min_lr": "learning_rate_min",
        "optim.label_smoothing": "label_smoothing_factor",
        "optim.rdrop": "reg_alpha rdrop_alpha r_drop",
        "train": "training",
        "train.batch_tokens": "max_tokens mini_batch_words",
        "train.accumulate": (
            "update_freq accumulation_steps accum_count batch_multiplier optimizer_delay "
            "gradient_accumulation_steps"
        ),
        "train.max_steps": "steps max_updates max_update train_steps updates after_batches",
        "train.max_epochs": "epochs max_epoch after_epochs num_train_epochs",
        "train.valid_every": (
            "eval_every valid_freq valid_steps validation_freq validate_interval_updates "
            "eval_steps save_freq save_steps save_checkpoint_steps save_interval_updates"
        ),
        "train.patience": "early_stopping early_stopping_patience",
        "train.batch_size": "max_sentences mini_batch per_device_train_batch_size",
        "train.max_time": "stop_time_hours",
        "train.device": "use_cuda",
        "train.precision": "fp16 bf16 model_dtype",
        "train.valid_beam": "generation_num_beams",
        "train.valid_samples": "print_valid_sents",
        "train.log_every": "log_interval report_every logging_freq disp_freq logging_steps",
        "train.tensorboard": "tensorboard_logdir tensorboard_log_dir",
        "train.best_metric": (
            "best_checkpoint_metric early_stopping_metric valid_metrics metric_for_best_model"
        ),
        "train.ema": "ema_decay average_decay exponential_smoothing",
        "train.init_from": (
            "finetune_from_model pretrained_model restore_file train_from load_model params"
        ),
        "train.keep_last": (
            "keep_interval_updates keep_last_epochs keep_checkpoint keep_best_ckpts keep_best "
            "overwrite save_total_limit"
        ),
        "decode": "decoding",
        "decode.beam": "beam_size num_beams",
        "decode.length_penalty": "alpha lenpen beam_alpha normalize",
        "decode.max_length": (
            "max_len_a max_len_b max_length_ratio max_length_factor max_output_length "
            "max_new_tokens"
        ),
    }.items()
    for other in others.split()
}
"""Their name -> our dotted key."""
