#!/usr/bin/env bash
# Installs the library of this checkout, editable so that its edits take effect.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m pip install --no-deps --no-build-isolation --editable .
