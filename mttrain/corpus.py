"""Text files as lines: reading them the same way everywhere, and writing them all or not at all.

Only a line feed ends a line, as for `wc -l`: the other Unicode separators (U+2028, U+0085, form
feed, a lone carriage return) are part of the text, because a reader that splits at them puts two
parallel files out of step. One carriage return before the line feed (Windows files) and a byte
order mark at the start of the file are dropped; gzip is recognised by its first bytes, not by the
file's name. Everything else, NUL bytes and odd spaces included, reaches the caller unchanged:
nothing is normalised.

Files are streamed, one line in memory at a time, at about 100 MB/s (gzip: half of that). What is
written goes to a temporary sibling, is flushed to the disk and then renamed over the target, so
that a reader sees the old file or the whole new one. The price is one fsync per file.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, TypeVar, cast

from mttrain.errors import DataError, WriteError, unequal_lines

TextPath = str | os.PathLike[str]
Item = TypeVar("Item")

GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_ZIP_MAGIC = b"PK\x03\x04"  # also .docx, .xlsx, .odt
_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = {ord("\n"): " ", ord("\r"): " "}


@dataclass(frozen=True, slots=True)
class Pair:
    """A source line, the line that translates it, and their line number, counted from 1."""

    line: int
    source: str
    target: str


def path_name(path: TextPath) -> str:
    """How messages call the file: its path, or "standard input" for "-"."""
    return "standard input" if os.fspath(path) == "-" else os.fspath(path)


def one_line(text: str) -> str:
    """The text with each line feed and carriage return replaced by a space; length unchanged."""
    return text.translate(_LINE_ENDS)


def in_blocks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`, the last one with what is left."""
    iterator = iter(items)
    while block := list(itertools.islice(iterator, size)):
        yield block


# ---- reading ----------------------------------------------------------------------------------


def read_lines(
    path: TextPath,
    *,
    errors: Literal["strict", "replace"] = "strict",
    on_replaced: Callable[[int], None] | None = None,
) -> Generator[str, None, None]:
    """Yield the lines of a UTF-8 file, plain or gzip, without their line ends; "-" is stdin.

    With errors="replace" bytes that are not UTF-8 become U+FFFD and `on_replaced` is called with
    the number of each such line (from 1). Otherwise they raise DataError with file, line and byte
    offset (from 0, in the unpacked text). A file that cannot be read raises DataError as well. The
    file is opened at the first `next`; a line from a pipe or terminal comes as soon as it is
    complete.
    """
    name = path_name(path)
    number, offset = 0, 0
    with reading(path, lambda: f"line {number}") as stream:
        for raw in stream:
            number += 1
            text = line_body(raw, first=number == 1)
            try:
                yield text.decode("utf-8")
            except UnicodeDecodeError:
                if errors == "strict":
                    raise DataError(not_utf8(name, number, offset, raw)) from None
                if on_replaced is not None:
                    on_replaced(number)
                yield text.decode("utf-8", errors="replace")
            offset += len(raw)


def read_pairs(source: TextPath, target: TextPath) -> Iterator[Pair]:
    """Yield the pairs of two parallel files in order.

    When one file ends before the other, both are counted to the end and DataError names both
    counts: whoever has consumed all pairs knows that the files are in step.
    """
    if path_name(source) == path_name(target) == "standard input":
        raise DataError("Source and target cannot both be standard input; name a file for one.")
    left, right = read_lines(source), read_lines(target)
    with contextlib.closing(left), contextlib.closing(right):
        number = 0
        for text in left:
            translation = next(right, None)
            if translation is None:
                count = number + 1 + _count(left)
                raise unequal_lines(path_name(source), count, path_name(target), number)
            number += 1
            yield Pair(number, text, translation)
        rest = _count(right)
        if rest:
            raise unequal_lines(path_name(source), number, path_name(target), number + rest)


def _count(lines: Iterator[str]) -> int:
    return sum(1 for _ in lines)


def line_body(raw: bytes, *, first: bool) -> bytes:
    """The line without its end, and without the byte order mark if it is the first of its file."""
    if raw.endswith(b"\r\n"):
        raw = raw[:-2]
    elif raw.endswith((b"\n", b"\r")):  # a carriage return alone: the last line, unterminated
        raw = raw[:-1]
    return raw.removeprefix(_BOM) if first else raw


def not_utf8(name: str, number: int, offset: int, raw: bytes) -> str:
    """The message about line `number`, whose bytes `raw` begin at `offset` of the text."""
    if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return f"{name}: this is UTF-16, not UTF-8; convert the file: iconv -f UTF-16 -t UTF-8."
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"{name}, line {number}, byte offset {offset + error.start}: byte "
            f"0x{raw[error.start]:02x} is not UTF-8. Correct the line, or convert the file: "
            "iconv -f ENCODING -t UTF-8."
        )
    raise AssertionError(f"{name}, line {number}: the line is UTF-8 after all")


@contextlib.contextmanager
def reading(path: TextPath, place: Callable[[], str]) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file or of stdin; what goes wrong with them is a DataError.

    place: how far the reader has come, for a gzip file that is damaged behind it.
    """
    name = path_name(path)
    try:
        with _open_bytes(path) as stream:
            yield stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{name}: the gzip data is damaged after {place()}: {error}.") from None
    except OSError as error:
        raise DataError(f"{name}: cannot read it: {error.strerror or error}.") from None


@contextlib.contextmanager
def _open_bytes(path: TextPath) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file or of stdin, as a buffered stream that iterates over lines."""
    if os.fspath(path) != "-":
        with open(path, "rb") as file, _unpacked(file, path) as stream:
            yield stream
        return
    if sys.stdin is None:
        raise DataError("Standard input is closed; give an input file.")
    source: Any = sys.stdin.buffer
    buffered = source if isinstance(source, io.BufferedReader) else io.BufferedReader(source)
    try:
        with _unpacked(buffered, path) as stream:
            yield stream
    finally:
        if buffered is not source:
            buffered.detach()  # or the collector would close a stream that is not ours


@contextlib.contextmanager
def _unpacked(file: io.BufferedReader[Any], path: TextPath) -> Iterator[BinaryIO]:
    # peek waits for one read at most, so that an interactive first line is not held back.
    start = file.peek(4)
    if start.startswith(_ZIP_MAGIC):
        raise DataError(
            f"{path_name(path)}: this is a packed (zip) file, not text; save it as plain text."
        )
    if not start.startswith(GZIP_MAGIC):
        yield cast(BinaryIO, file)
        return
    # GzipFile reads concatenated members as one text; the buffer makes its line iteration fast.
    with gzip.GzipFile(fileobj=file) as unpacked, io.BufferedReader(unpacked) as stream:
        yield cast(BinaryIO, stream)


def load_json(path: TextPath, limit: int) -> Any:
    """What a plain JSON file of at most `limit` bytes holds.

    A stranger may have made it. OSError for any other kind of file: a pipe would be waited for, a
    terabyte would fill the memory. ValueError for other text, and where one object has a name
    twice: each reader takes another one.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(errno.EINVAL, "it is no plain file")
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit >> 20} MB")
        data = file.read(limit)
    try:
        return json.loads(data, object_pairs_hook=_unrepeated)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("one object has a name twice")
    return content


# ---- writing ----------------------------------------------------------------------------------


class LineWriter:
    """Write lines to a file, or to stdout for "-" and None, as UTF-8 with LF ends.

    A context manager. A file appears under its name only when the block ends without an exception;
    otherwise its old content stays. A name ending in ".gz" is compressed. Devices and pipes
    (/dev/null, process substitution) are written directly. A full disk or a missing folder raises
    DataError; a closed pipe stays BrokenPipeError.
    """

    def __init__(self, path: TextPath | None) -> None:
        self.count = 0
        self._path = None if path is None or os.fspath(path) == "-" else Path(path)
        self._stack = contextlib.ExitStack()
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> LineWriter:
        with _writing(self._path):
            self._stream = self._stack.enter_context(_output_stream(self._path))
        return self

    def write(self, line: str) -> None:
        """Write one line; line feeds and carriage returns inside it become spaces.

        What is no character, as in the name of a file that is not UTF-8, is spelled out.
        """
        assert self._stream is not None, "LineWriter is used outside its with block"
        try:  # spelled out: a context manager here would double the cost of a line
            self._stream.write(one_line(line).encode("utf-8", "backslashreplace") + b"\n")
        except OSError as error:
            raise _refusal(self._path, error) from None
        self.count += 1

    def flush(self) -> None:
        """Hand everything written so far to the operating system."""
        assert self._stream is not None, "LineWriter is used outside its with block"
        with _writing(self._path):
            self._stream.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stream = None
        with _writing(self._path):
            self._stack.__exit__(kind, error, traceback)


def require_writable(path: TextPath) -> None:
    """Raise now what writing the file would raise: no such folder, no right to write there.

    For whoever would otherwise learn it after hours of work; "-" is stdout, which may be closed.
    """
    if os.fspath(path) == "-":
        _require_stdout()
        return
    real = Path(os.path.realpath(path))
    if real.is_dir():
        problem = errno.EISDIR
    elif not real.parent.is_dir():
        problem = errno.ENOTDIR if real.parent.exists() else errno.ENOENT
    elif not os.access(real if real.exists() and not real.is_file() else real.parent, os.W_OK):
        problem = errno.EACCES
    else:
        return
    raise _refusal(Path(path), OSError(problem, os.strerror(problem)))


def _require_stdout() -> None:
    if sys.stdout is None:
        raise DataError("Standard output is closed; give an output file.")


def write_lines(path: TextPath | None, lines: Iterable[str]) -> int:
    """Write the lines as `LineWriter` does and return how many there were."""
    with LineWriter(path) as writer:
        for line in lines:
            writer.write(line)
    return writer.count


def atomic_write_bytes(path: TextPath, data: bytes) -> None:
    """Replace the file by `data` in one step; after a crash it holds the old or the new bytes."""
    with _writing(Path(path)), _replacing(Path(path)) as stream:
        stream.write(data)


def atomic_write_text(path: TextPath, text: str) -> None:
    """`atomic_write_bytes` of the text as UTF-8, its line feeds as they are."""
    atomic_write_bytes(path, text.encode("utf-8"))


def sync_directory(directory: TextPath) -> None:
    """Flush a directory, so that names created or renamed in it survive a power cut."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return  # not possible on every system; the files themselves are flushed
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _refusal(path, error) from None


def _refusal(path: Path | None, error: OSError) -> Exception:
    """The system's refusal as one sentence; a closed pipe is left to the command line."""
    if isinstance(error, BrokenPipeError):
        return error
    name = "standard output" if path is None else path
    reason = error.strerror or error
    if path is not None and error.errno == errno.ENOENT:
        folder = path.parent if not path.parent.exists() else Path(os.path.realpath(path)).parent
        if not folder.exists():
            reason = f"the folder {folder} does not exist; make it first"
    return WriteError(f"{name}: cannot write it: {reason}.")


@contextlib.contextmanager
def _output_stream(path: Path | None) -> Iterator[IO[bytes]]:
    if path is None:
        _require_stdout()
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with _replacing(path) as stream:
        if path.suffix != ".gz":
            yield stream
            return
        # No name and no date inside, so that equal text gives equal files.
        with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed:
            yield cast(IO[bytes], packed)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose bytes replace `path` when the block ends well, and vanish otherwise."""
    path = Path(os.path.realpath(path))  # a link stays a link; the file it names is replaced
    old_mode = path.stat().st_mode if path.exists() else None
    if old_mode is not None and not stat.S_ISREG(old_mode):
        with open(path, "wb") as stream:  # a device or pipe must not be renamed over
            yield stream
        return
    temporary = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        if old_mode is not None:
            with contextlib.suppress(OSError):
                shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


# ---- identity ---------------------------------------------------------------------------------


def file_key(path: TextPath) -> dict[str, str | int]:
    """Absolute path, size in bytes, modification time in ns; all equal: taken as unchanged."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path_name(path)}: cannot read it: {error.strerror}.") from None
    return {
        "path": os.path.realpath(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
    }


def file_sha256(path: TextPath) -> str:
    """The SHA-256 of the file's bytes, in hex."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path_name(path)}: cannot read it: {error.strerror}.") from None
