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
    Sandbox(folder, socket).run("mttrain", "train", "--config", "tiny.yaml")
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
