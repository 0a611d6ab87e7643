#!/bin/sh
# Prints the path of a Python of at least the given version (or, with "exact", of just that minor version), found on PATH,
# through pyenv or through uv. Fails with one clear line if there is none.
set -eu
wanted=$1
mode=${2:-least}

fits() {
    [ -n "$1" ] && "$1" - "$wanted" "$mode" 2>/dev/null <<'PY'
import sys
wanted = tuple(map(int, sys.argv[1].split(".")))
here = sys.version_info[:2]
sys.exit(not (here == wanted if sys.argv[2] == "exact" else wanted <= here < (3, 15)))
PY
}

try() {
    if fits "$1"; then
        echo "$1"
        exit 0
    fi
}

if command -v pyenv >/dev/null 2>&1 || [ -d "${PYENV_ROOT:-$HOME/.pyenv}/versions" ]; then
    for python in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/$wanted"*/bin/python 2>/dev/null | sort -V -r); do
        try "$python"
    done
fi
for name in "python$wanted" python3.14 python3.13 python3.12 python3 python; do
    try "$(command -v "$name" 2>/dev/null || true)"
done
if command -v uv >/dev/null 2>&1; then
    try "$(uv python find "$wanted" 2>/dev/null || true)"
fi
[ "$mode" = exact ] && which=$wanted || which="$wanted or newer"
echo "jaxkv needs Python $which, and none was found on PATH, through pyenv or through uv." \
    "Install one, for example with 'pyenv install $wanted' or 'uv python install $wanted', and run make again." >&2
exit 1
