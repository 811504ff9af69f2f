"""Text files: where lines end, what is kept and refused, and that writing is all or nothing."""

from __future__ import annotations

import gzip
import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mttrain.corpus import (
    LineWriter,
    Pair,
    atomic_write_bytes,
    atomic_write_text,
    file_key,
    file_sha256,
    one_line,
    read_lines,
    read_pairs,
    require_writable,
    write_lines,
)
from mttrain.errors import DataError

SEPARATORS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e"]


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def lines_of(tmp_path: Path, data: bytes) -> list[str]:
    return list(read_lines(put(tmp_path / "text", data)))


def run_python(code: str, *args: str, data: bytes = b"", **env: str) -> bytes:
    """Standard output of a new interpreter."""
    process = subprocess.run(
        [sys.executable, "-c", code, *args],
        input=data,
        capture_output=True,
        check=False,
        env={**os.environ, **env},
    )
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout


# ---- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", SEPARATORS)
def test_unicode_line_boundaries_are_text(tmp_path: Path, separator: str) -> None:
    """T01: a reader that splits like str.splitlines puts all later lines out of step."""
    text = f"one\nA{separator}B\nthree\n"
    assert lines_of(tmp_path, text.encode()) == ["one", f"A{separator}B", "three"]


def test_lone_carriage_return_is_text(tmp_path: Path) -> None:
    """T03: Python's default text mode makes three lines of these two."""
    source = put(tmp_path / "s", b"one\rtwo\nthree\n")
    target = put(tmp_path / "t", b"1 2\n3\n")
    assert list(read_pairs(source, target)) == [
        Pair(1, "one\rtwo", "1 2"),
        Pair(2, "three", "3"),
    ]


def test_crlf_equals_lf(tmp_path: Path) -> None:
    """T04: a carriage return stuck to the last word of each line makes other words of them."""
    assert lines_of(tmp_path, b"a b\r\nc\r\n\r\nd") == ["a b", "c", "", "d"]


def test_only_one_carriage_return_is_removed(tmp_path: Path) -> None:
    """T04: stripping every CR would change text that really holds one."""
    assert lines_of(tmp_path, b"a\r\r\nb\r") == ["a\r", "b"]


def test_byte_order_mark_is_dropped_at_the_start_only(tmp_path: Path) -> None:
    """T05: the first word of a Windows file was another word than everywhere else."""
    bom = b"\xef\xbb\xbf"
    assert lines_of(tmp_path, bom + b"Hello\n" + bom + b"x\n") == ["Hello", "\ufeffx"]
    assert lines_of(tmp_path, bom) == [""]


def test_byte_order_mark_of_each_file_and_inside_gzip(tmp_path: Path) -> None:
    """T05: each file has its own start, also when it is compressed."""
    packed = gzip.compress(b"\xef\xbb\xbfa\r\nb\n")
    assert lines_of(tmp_path, packed) == ["a", "b"]
    assert lines_of(tmp_path, b"\xef\xbb\xbfa\n") == ["a"]


def test_nul_bytes_are_kept(tmp_path: Path) -> None:
    """T06: a reader that stops at NUL finds fewer lines on one side."""
    source = put(tmp_path / "s", b"1\na b\x00c d\n3\n4\n")
    target = put(tmp_path / "t", b"1\n2\n3\n4\n")
    pairs = list(read_pairs(source, target))
    assert [pair.source for pair in pairs] == ["1", "a b\x00c d", "3", "4"]


def test_invalid_utf8_names_file_line_and_byte(tmp_path: Path) -> None:
    """T07: a decoding traceback hours later named neither file nor line."""
    data = b"ok\n" * 6 + b"caf\xe9 ouvert\n" + b"ok\n" * 3
    with pytest.raises(DataError, match=r"text, line 7, byte offset 21: byte 0xe9 is not UTF-8"):
        lines_of(tmp_path, data)


def test_byte_offset_counts_the_byte_order_mark(tmp_path: Path) -> None:
    """T07: the offset is one that `dd skip=` and editors understand, whatever was stripped."""
    data = b"\xef\xbb\xbfab\r\nc\xff\r\n"
    assert data[8] == 0xFF
    with pytest.raises(DataError, match="line 2, byte offset 8: byte 0xff"):
        lines_of(tmp_path, data)
    with pytest.raises(DataError, match=r"line 1, byte offset 5: byte 0xff.*iconv -f ENCODING -t"):
        lines_of(tmp_path, b"\xef\xbb\xbfab\xff\n")


def test_truncated_character_at_the_end(tmp_path: Path) -> None:
    """T07: half a character at the end of the file must not be lost in silence."""
    with pytest.raises(DataError, match="line 2, byte offset 3: byte 0xe2"):
        lines_of(tmp_path, b"ab\n\xe2\x82")


def test_utf16_is_called_by_its_name(tmp_path: Path) -> None:
    """A file saved as "Unicode" on Windows: the message must tell what to convert."""
    with pytest.raises(DataError, match=r"text: this is UTF-16.*iconv -f UTF-16 -t UTF-8"):
        lines_of(tmp_path, "hello\n".encode("utf-16"))


def test_replacing_bad_bytes_keeps_and_reports_each_line(tmp_path: Path) -> None:
    """T07: `translate` may replace bytes, but it must count the lines and drop none."""
    path = put(tmp_path / "text", b"a\nb\xe9\n\xff\xfec\nd\n\xe2\x82")
    seen: list[int] = []
    lines = list(read_lines(path, errors="replace", on_replaced=seen.append))
    assert lines == ["a", "b\ufffd", "\ufffd\ufffdc", "d", "\ufffd"]
    assert seen == [2, 3, 5]


def test_encoded_surrogates_are_not_utf8(tmp_path: Path) -> None:
    """T07: surrogates that slip through make the tokenizer raise a TypeError."""
    with pytest.raises(DataError, match="line 1, byte offset 0"):
        lines_of(tmp_path, b"\xed\xa0\x80\n")


def test_empty_lines_and_files(tmp_path: Path) -> None:
    """T08: an empty line is a line; an empty file has none."""
    assert lines_of(tmp_path, b"Hello .\n\nBye .\n") == ["Hello .", "", "Bye ."]
    assert lines_of(tmp_path, b"") == []
    assert lines_of(tmp_path, b"\n\n") == ["", ""]


@pytest.mark.parametrize("counts", [(100, 99), (99, 100), (0, 3), (3, 0)])
def test_unequal_files_are_refused_with_both_counts(
    tmp_path: Path, counts: tuple[int, int]
) -> None:
    """T10: zip() cut the longer side, and training went on with pairs out of step."""
    source = put(tmp_path / "train.en", b"x\n" * counts[0])
    target = put(tmp_path / "train.de", b"y\n" * counts[1])
    with pytest.raises(DataError) as error:
        list(read_pairs(source, target))
    assert f"{source} has {counts[0]} lines" in str(error.value)
    assert f"{target} has {counts[1]}" in str(error.value)


def test_missing_final_newline(tmp_path: Path) -> None:
    """T11: counting line feeds finds one line too few, splitting at them one too many."""
    source = put(tmp_path / "s", b"a\nlast line")
    target = put(tmp_path / "t", b"b\nletzte\n")
    assert list(read_pairs(source, target)) == [Pair(1, "a", "b"), Pair(2, "last line", "letzte")]


def test_pairs_with_empty_sides_stay_aligned(tmp_path: Path) -> None:
    """T12: skipping the empty lines of one side shifts all later pairs."""
    source = put(tmp_path / "s", b"1\n\n3\n")
    target = put(tmp_path / "t", b"\n2\n3\n")
    assert [(p.source, p.target) for p in read_pairs(source, target)] == [
        ("1", ""),
        ("", "2"),
        ("3", "3"),
    ]


def test_gzip_by_content_not_by_name(tmp_path: Path) -> None:
    """T18: a gzip file without the suffix was read as text; two members are one text."""
    members = gzip.compress("ä\nb".encode()) + gzip.compress(b"c\nd\n")
    assert lines_of(tmp_path, members) == ["ä", "bc", "d"]
    assert list(read_lines(put(tmp_path / "plain.gz", b"not packed\n"))) == ["not packed"]
    assert lines_of(tmp_path, gzip.compress(b"")) == []


@pytest.mark.parametrize("damage", ["cut", "flip", "tail"])
def test_damaged_gzip_is_refused(tmp_path: Path, damage: str) -> None:
    """T18: a half-copied archive must not train on its first half, nor end in a traceback."""
    data = bytearray(gzip.compress("\n".join(map(str, range(5000))).encode()))
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    else:
        data += b"garbage"
    with pytest.raises(DataError, match="text"):
        lines_of(tmp_path, bytes(data))


def test_odd_spaces_are_kept(tmp_path: Path) -> None:
    """T20: stripping or splitting at white space loses no-break spaces and tabs."""
    text = "10\u00a0000\u202f€\na\tb\na  b\n lead\ntrail \na\u3000b\n"
    assert lines_of(tmp_path, text.encode()) == text.split("\n")[:-1]


def test_unreadable_paths(tmp_path: Path) -> None:
    """A missing file or a folder is the user's slip: one sentence with its name."""
    with pytest.raises(DataError, match=r"nowhere: cannot read it: No such file"):
        list(read_lines(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="cannot read it: Is a directory"):
        list(read_lines(tmp_path))


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))))
def test_write_then_read_gives_the_same_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    """Any text survives the way to disk and back, plain and packed (a leading BOM excepted)."""
    if lines and lines[0].startswith("\ufeff"):
        lines[0] = lines[0].lstrip("\ufeff")
    directory = tmp_path_factory.mktemp("lines")
    for name in ("text", "text.gz"):
        assert write_lines(directory / name, lines) == len(lines)
        assert list(read_lines(directory / name)) == lines


def test_stdin_gives_a_line_before_the_next_one_comes() -> None:
    """S18: read-ahead held back the first answer until the second line or the end of input."""
    code = (
        "import sys; from mttrain.corpus import read_lines\n"
        "for line in read_lines('-'): print(line, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(30, process.kill)
        watchdog.start()
        for line in ("a", "", "b"):
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline() == f"{line}\n".encode()
        process.stdin.write("ü".encode())
        process.stdin.close()
        assert process.stdout.read() == "ü\n".encode()
        watchdog.cancel()
    assert process.returncode == 0


@pytest.mark.parametrize("pack", [False, True])
def test_stdin_and_stdout_are_utf8_in_any_locale(pack: bool) -> None:
    """T18, T05: stdin is unpacked and stripped like a file, whatever the locale says."""
    code = "from mttrain.corpus import *; write_lines('-', read_lines('-'))"
    data = "\ufeffGrüße\u2028你好\r\nx".encode()
    output = run_python(
        code, data=gzip.compress(data) if pack else data, LC_ALL="C", PYTHONUTF8="0"
    )
    assert output == "Grüße\u2028你好\nx\n".encode()


def test_stdin_that_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that replace sys.stdin (test runners do) keep their stream open."""
    stream = io.TextIOWrapper(io.BytesIO(b"a\nb"))
    monkeypatch.setattr(sys, "stdin", stream)
    assert list(read_lines("-")) == ["a", "b"]
    assert not stream.buffer.closed
    with pytest.raises(DataError, match="both be standard input"):
        list(read_pairs("-", "-"))


# ---- writing ----------------------------------------------------------------------------------


def test_one_line_keeps_other_separators() -> None:
    """A line feed inside a translation made two output lines of one."""
    assert one_line("a\nb\r\nc\u2028d\x0be") == "a b  c\u2028d\x0be"


def test_written_lines_are_single_and_end_in_lf(tmp_path: Path) -> None:
    """K12: whatever a model emits, N texts are N lines."""
    path = tmp_path / "out"
    assert write_lines(path, ["a\nb", "c\r", "", "d\u2028e"]) == 4
    assert path.read_bytes() == "a b\nc \n\nd\u2028e\n".encode()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """An interrupted run left half a file under the final name."""
    path = put(tmp_path / "out", b"old\n")
    with pytest.raises(KeyboardInterrupt), LineWriter(path) as writer:
        writer.write("new")
        writer.flush()
        assert path.read_bytes() == b"old\n"
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old\n"
    assert os.listdir(tmp_path) == ["out"]


def test_packed_output_is_the_same_every_time(tmp_path: Path) -> None:
    """A date or name inside the gzip header made equal outputs differ."""
    for name in ("a.gz", "b.gz"):
        write_lines(tmp_path / name, ["x", "y"])
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"x\ny\n"


def test_devices_and_links_are_not_replaced(tmp_path: Path) -> None:
    """Renaming over /dev/null or over a link destroys the device or the link."""
    link, real = tmp_path / "link", put(tmp_path / "real", b"old\n")
    link.symlink_to(real)
    write_lines(link, ["new"])
    assert link.is_symlink() and real.read_bytes() == b"new\n"
    write_lines(os.devnull, ["x"])
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_permissions_follow_the_umask_and_the_old_file(tmp_path: Path) -> None:
    """Temporary files are private; the finished file must not be."""
    umask = os.umask(0o022)
    try:
        write_lines(tmp_path / "new", ["x"])
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o644
    (tmp_path / "new").chmod(0o640)
    atomic_write_text(tmp_path / "new", "y")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """A full disk ended in a traceback."""
    with pytest.raises(DataError, match="/dev/full: cannot write it: No space left"):
        write_lines("/dev/full", ["x" * 100_000])
    with pytest.raises(DataError, match=r"the folder .* does not exist"):
        write_lines(tmp_path / "no" / "folder", ["x"])


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    """A missing folder was found out after the work was done; the words are those of writing."""
    (tmp_path / "folder").mkdir()
    put(tmp_path / "file", b"old\n")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "new")
    for path in ("no/where", "folder", "file/below"):
        with pytest.raises(DataError) as before:
            require_writable(tmp_path / path)
        with pytest.raises(DataError) as after:
            write_lines(tmp_path / path, ["x"])
        assert str(before.value) == str(after.value)
    for path in ("new", "file", "folder/new", "link", os.devnull):
        require_writable(tmp_path / path)
    require_writable("-")
    assert (tmp_path / "file").read_bytes() == b"old\n"
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "link"]


def test_closed_pipe_stays_a_closed_pipe() -> None:
    """S17: `| head -1` is no data error; the command line ends quietly on BrokenPipeError."""
    code = (
        "import os, sys; from mttrain.corpus import write_lines\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "try:\n    write_lines('-', ['x' * 99] * 9999)\n"
        "except BrokenPipeError:\n    os.write(2, b'')\n    os._exit(0)"
    )
    run_python(code)


def test_atomic_bytes_and_identity(tmp_path: Path) -> None:
    """Keys and hashes notice a changed file, so that no stale store is used."""
    path = tmp_path / "file"
    atomic_write_bytes(path, b"abc")
    # The SHA-256 of "abc", FIPS 180-2, appendix B.1.
    assert file_sha256(path).startswith("ba7816bf8f01cfea414140de5dae2223")
    before = file_key(path)
    assert before["size"] == 3 and before["path"] == os.path.realpath(path)
    os.utime(path, ns=(0, 10**9))
    assert file_key(path)["mtime_ns"] == 10**9 != before["mtime_ns"]
    with pytest.raises(DataError, match="nowhere"):
        file_key(tmp_path / "nowhere")
    with pytest.raises(DataError, match="nowhere"):
        file_sha256(tmp_path / "nowhere")


def test_packed_office_files_are_named(tmp_path: Path) -> None:
    """A .docx was refused as "byte 0x.. is not UTF-8", or translated as garbage."""
    path = tmp_path / "text.docx"
    path.write_bytes(b"PK\x03\x04\x14\x00\xff\n")
    for errors in ("strict", "replace"):
        with pytest.raises(DataError, match=r"text\.docx: this is a packed \(zip\) file, not text"):
            list(read_lines(path, errors=errors))  # type: ignore[arg-type]
