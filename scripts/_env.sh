# Sourced by the other scripts: goes to the project's folder, makes .venv when it is absent, and
# installs the project there, again only when pyproject.toml or constraints.txt has changed.
#
#     prepare_environment run     # the package alone
#     prepare_environment dev     # and what the tests and checks need
#
# pip's usual settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf, ...) apply.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv_python=.venv/bin/python

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or newer is needed and none was found (tried ${PYTHON:-python3, python3.11 to 3.14});" \
        "install one, or name it: PYTHON=/path/to/python $0" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    echo "making .venv with $("$python" --version)" >&2
    if ! "$python" -m venv .venv >&2; then
        rm -rf .venv
        echo "error: '$python -m venv' failed; on Debian and Ubuntu it needs the package python3-venv" >&2
        return 1
    fi
}

prepare_environment() {
    local extra=$1 target=. stamp=.venv/installed.txt sum
    [ -x "$venv_python" ] || make_venv
    sum=$(cat pyproject.toml constraints.txt | cksum)
    # An environment for the tests serves the quick start too.
    if [ -f "$stamp" ] && { [ "$(cat "$stamp")" = "dev $sum" ] || [ "$(cat "$stamp")" = "$extra $sum" ]; }; then
        return
    fi
    [ "$extra" = run ] || target=".[$extra]"
    echo "installing mttrain and what it needs into .venv (the first time takes minutes)" >&2
    if ! "$venv_python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$target" >&2; then
        echo "error: pip could not install the packages; its message stands above" >&2
        return 1
    fi
    echo "$extra $sum" >"$stamp"
}
