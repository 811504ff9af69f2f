"""Every command and every code block of the README and of docs/ is run, in the order of its page.

How, and what a page can say about its blocks, is told in `docs_sandbox`; that training is made
short, in `docs_shim`. `-m slow` runs the same with a true process for each command.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.docs_sandbox import (
    PAGES,
    TINY,
    Block,
    BlockFailed,
    PageRun,
    Sandbox,
    blocks,
    make_template,
    prepare,
    start_server,
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """Where the server listens; in a short path, which a socket needs."""
    with tempfile.TemporaryDirectory(prefix="docs") as folder, tempfile.TemporaryFile() as log:
        path = Path(folder) / "socket"
        server = start_server(path, log)
        yield path
        assert server.stdin is not None and server.stdout is not None
        server.stdin.close()
        server.wait()
        server.stdout.close()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, socket: Path) -> Path:
    """What the directory of a page is copied from; with a tiny run that was really trained."""
    folder = tmp_path_factory.mktemp("clone")
    make_template(folder)
    (folder / "tiny.yaml").write_text(TINY, encoding="utf-8")
    Sandbox(folder, socket).run("docs-as-is", "train", "--config", "tiny.yaml")
    (folder / "tiny.yaml").unlink()
    return folder


def run_page(page: Path, template: Path, folder: Path, socket: Path | None) -> list[Block]:
    """Run a page in a directory of its own; the blocks that were run."""
    shutil.copytree(template, folder)
    prepare(page, folder)
    run = PageRun(Sandbox(folder, socket), blocks(page))
    run.run()
    return run.ran


@each_page
def test_blocks_of_the_page_run(page: Path, template: Path, tmp_path: Path, socket: Path) -> None:
    """Stops a page from showing a command that does not work as it is written."""
    run_page(page, template, tmp_path / "clone", socket)


@pytest.mark.slow
@each_page
def test_blocks_run_as_real_processes(page: Path, template: Path, tmp_path: Path) -> None:
    """Stops a page that works only because the commands are forks of one process."""
    run_page(page, template, tmp_path / "clone", None)


@each_page
def test_blocks_that_are_not_run_say_why(page: Path) -> None:
    """Stops the mark that keeps a block from being run from becoming a habit; -s lists them."""
    for block in blocks(page):
        if block.not_run is not None:
            print(f"not run: {block.name}: {block.not_run}")
            assert len(block.not_run) >= 10, f"{block.name}: why is it not run?"
            assert block.language not in ("", "text"), f"{block.name} would not be run anyway"


# ---- the harness itself -------------------------------------------------------------------------

WRONG = {
    "a command": "```bash\nfalse\n```\n",
    "a part of a pipe": "```bash\nfalse | cat\n```\n",
    "the second command": "```bash\nX=1\n```\n\n```bash\ntest $X = 1\ntest $X = 2\n```\n",
    "behind a dollar": "```console\n$ false\noutput\n```\n",
    "a program that is not there": "```bash\nmttrainn --help\n```\n",
    "our program": "```bash\nmttrain translate --model runs/none </dev/null\n```\n",
    "Python": "```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n",
    "a key": "```yaml\ntrain: {max_stepz: 3}\n```\n",
    "JSON": '```json\n{"a": }\n```\n',
    "a language": "```ruby\nputs 1\n```\n",
    "an error message": "```bash\necho error: bad\n```\n\n```text\nerror: good\n```\n",
    "the package index": "```bash\npip install mttrain\n```\n",
}


def made_up(folder: Path, text: str, socket: Path) -> PageRun:
    """The run of a page with this text, in an empty directory."""
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return PageRun(Sandbox(folder, socket), blocks(page))


@pytest.mark.parametrize("text", WRONG.values(), ids=list(WRONG))
def test_wrong_block_is_found(text: str, tmp_path: Path, socket: Path) -> None:
    """Stops the tests above from passing whatever the pages say."""
    with pytest.raises((BlockFailed, ValueError), match=r"page\.md|Expecting value"):
        made_up(tmp_path, text, socket).run()


def test_right_blocks_share_a_state(tmp_path: Path, socket: Path) -> None:
    """Stops a block from being run in another directory or without what came before it."""
    text = (
        "```bash\nmkdir sub\ncd sub\nWORD=small\n```\n\n"
        "<!-- not run: it would fail here -->\n```bash\nfalse\n```\n\n"
        "Save this as `a.yaml`:\n\n```yaml\nrun_dir: r\ndata: {source_lang: en, target_lang: de, "
        "train: {source: a, target: b}, valid: {source: a, target: b}}\n"
        "train: {max_steps: 3}\n```\n\n"
        "- in a list:\n\n  ```bash\n  mttrain --version | grep mttrain > $WORD.txt\n  ```\n\n"
        "```text\noutput\n```\n\n"
        "```python\nfrom pathlib import Path\n```\n\n"
        "```python\nassert Path('sub/small.txt').exists() and Path('a.yaml').exists()\n```\n"
    )
    run = made_up(tmp_path, text, socket)
    run.run()
    assert [block.language for block in run.ran] == ["bash", "yaml", "bash", "python", "python"]
    assert [block.not_run for block in run.blocks if block.not_run] == ["it would fail here"]
