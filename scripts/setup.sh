#!/usr/bin/env bash
# Makes the development environment: setup.sh PYTHON DIRECTORY
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
environment=$2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "memfit needs Python 3.11 or later; $python is $("$python" --version). Try: make PYTHON=python3.11" >&2
    exit 1
fi

# Debian packs ensurepip, which venv needs, apart from Python itself.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
    else
        echo "$python has no ensurepip. On Debian: sudo apt-get install python3-venv" >&2
        exit 1
    fi
fi

"$python" -m venv "$environment"
install=("$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt)

# torch goes first and by its exact version: whatever asks for it later, more loosely, then finds it in place
# and does not fetch a build with gigabytes of CUDA libraries.
torch=$(grep '^torch==' constraints.txt)
"${install[@]}" "$torch"
# The build backend is installed here, and not in isolation, so that its version is constrained too.
"${install[@]}" hatchling
"${install[@]}" --no-build-isolation --editable '.[torch,timm,hf,data,s3,dev]'

# Without Triton, which it asks for: hundreds of MB, and a dry run does without.
"${install[@]}" --no-deps liger-kernel

# Plain code must work here, not only memfit's: see scripts/torchvision_import.py.
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp scripts/torchvision_import.py "$packages/"
echo 'import torchvision_import' >"$packages/torchvision_import.pth"
if ! "$environment/bin/python" -c 'import accelerate, timm, torchvision
from transformers import BertForSequenceClassification'; then
    echo "The environment in $environment is not usable: plain code can't import what it holds (see above)." >&2
    exit 1
fi
touch "$environment/.ready"
