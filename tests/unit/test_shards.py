"""Which files a pattern names, and which of two sides belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mttrain.config import CorpusConfig, DataConfig
from mttrain.corpus import Pair
from mttrain.errors import DataError
from mttrain.pairs import parallel_text
from mttrain.shards import is_pattern, matching


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x\n")


def names(folder: Path, *found: list[str]) -> list[list[str]]:
    return [[str(Path(name).relative_to(folder)) for name in side] for side in found]


def test_sides_go_together_by_what_the_wildcards_stand_for(tmp_path: Path) -> None:
    """Sorted by name alone, sides whose folders or endings differ could go together wrongly."""
    touch(tmp_path, "a/x-1.en.gz", "b/x-2.en.gz", "a/x-1.de", "b/x-2.de", "a/other.en.gz")
    one, two = matching([f"{tmp_path}/?/x-*.en.gz", f"{tmp_path}/?/x-*.de"])
    assert names(tmp_path, one, two) == [
        ["a/x-1.en.gz", "b/x-2.en.gz"],
        ["a/x-1.de", "b/x-2.de"],
    ]


def test_hidden_files_are_no_shards(tmp_path: Path) -> None:
    """What other systems and editors leave beside a file ("._1.en", ".1.en") became training text;
    who wants such files names the dot."""
    touch(tmp_path, "1.en", "1.de", "._1.en", "._1.de")
    assert names(tmp_path, *matching([f"{tmp_path}/*.en", f"{tmp_path}/*.de"])) == [
        ["1.en"],
        ["1.de"],
    ]
    assert names(tmp_path, *matching([f"{tmp_path}/._*.en"])) == [["._1.en"]]


@pytest.mark.parametrize("lacking", ["2.en", "2.de"])
def test_missing_shard_is_named(tmp_path: Path, lacking: str) -> None:
    """T10 for shards: with as many files on both sides, and one of each lost, all pairs behind
    would have been wrong ones."""
    touch(tmp_path, "1.en", "1.de", "2.en", "2.de", "3.en", "3.de")
    (tmp_path / lacking).unlink()
    other = {"2.en": "2.de", "2.de": "2.en"}[lacking]
    with pytest.raises(DataError, match=rf"{other} has no partner among the files of .*\*\."):
        matching([f"{tmp_path}/*.en", f"{tmp_path}/*.de"])


def test_a_file_of_that_name_comes_first(tmp_path: Path) -> None:
    """A name that holds a star or a bracket is still a name."""
    touch(tmp_path, "a*.en", "ab.en", "c[1].en", "c1.en")
    assert not is_pattern(f"{tmp_path}/a*.en") and is_pattern(f"{tmp_path}/b*.en")
    assert matching([f"{tmp_path}/a*.en"]) == [[f"{tmp_path}/a*.en"]]
    assert matching([f"{tmp_path}/c[1]*.en"]) == [[f"{tmp_path}/c[1].en"]]
    with pytest.raises(DataError, match="no file has such a name"):
        matching([f"{tmp_path}/no-*.en"])


def test_names_without_wildcards_need_not_exist() -> None:
    """Whoever reads them says so better."""
    assert matching(["no.en", "neither.de"]) == [["no.en"], ["neither.de"]]


def test_shards_are_one_text(files: Callable[..., str], tmp_path: Path) -> None:
    """Lines count in their own shard; both forms of a corpus can be in shards."""
    files("0.en", ["a", "b"]), files("0.de", ["A", "B"])
    files("1.en", ["c"]), files("1.de", ["C"])
    files("0.tsv", ["a\tA", "b\tB"]), files("1.tsv", ["c\tC"])
    two = CorpusConfig(source=f"{tmp_path}/*.en", target=f"{tmp_path}/*.de")
    one = CorpusConfig(pairs=f"{tmp_path}/*.tsv")
    wanted = [Pair(1, "a", "A"), Pair(2, "b", "B"), Pair(1, "c", "C")]
    for corpus in (two, one):
        data = DataConfig(source_lang="en", target_lang="de", train=[corpus], valid=corpus)
        text = parallel_text(corpus, data)
        assert list(text.pairs()) == wanted
        assert list(text.side("target")) == ["A", "B", "C"]
        assert [list(shard.pairs()) for shard in text.shards()] == [wanted[:2], wanted[2:]]
        assert "1 more shard" in text.name
        assert len(text.all_files()) == 2 * len(text.files)
        before = text.identity()
        files("1.de" if corpus is two else "1.tsv", ["c\tC and more"])
        assert text.identity() != before
