#!/usr/bin/env bash
# Set-up and the tests: style, types, import direction, and pytest on all cores. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh dev

echo "+ ruff check ."
ruff check .
echo "+ mypy"
mypy
echo "+ lint-imports"
lint-imports
# One thread a worker: several threads each on the same cores thrash.
export OMP_NUM_THREADS=1
# Converted once, before the workers would do it side by side.
python -c 'from data.bundled import resolve_target; resolve_target("bundled:smollm2-135m")'
echo "+ pytest -n auto $*"
pytest -n auto --dist loadfile -q "$@"
