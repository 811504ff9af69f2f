"""What other trainers call our settings, for "did you mean" where one of their names is written."""

from __future__ import annotations

OTHER_NAMES = {
    other: name
    for name, others in {
        "run_dir": "output_dir model_dir save_dir",
        "data.source_lang": "src_lang",
        "data.target_lang": "tgt_lang",
        "data.max_length": "max_len max_seq_len",
        "tokenizer.vocab_size": "vocab",
        "model.d_model": "hidden_size embedding_size emb_dim",
        "model.d_ff": "ff_size ffn_dim",
        "model.num_heads": "heads n_heads nhead",
        "model.encoder_layers": "layers num_layers n_layers",
        "model.tie": "share_embeddings tied_embeddings",
        "optim": "optimizer",
        "optim.lr": "learning_rate max_lr",
        "optim.warmup_steps": "warmup warmup_updates",
        "optim.clip_norm": "clip grad_clip max_grad_norm",
        "train": "training",
        "train.batch_tokens": "max_tokens",
        "train.accumulate": "update_freq accumulation_steps",
        "train.max_steps": "steps max_updates",
        "train.max_epochs": "epochs",
        "train.valid_every": "eval_every",
        "train.patience": "early_stopping",
        "decode": "decoding",
        "decode.beam": "beam_size num_beams",
        "decode.length_penalty": "alpha",
    }.items()
    for other in others.split()
}
"""Their name -> our dotted key."""
