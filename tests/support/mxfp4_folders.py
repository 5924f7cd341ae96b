"""Model folders with experts in MXFP4, and the same numbers plain."""

import json
import shutil

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

GROUP = 32  # numbers to a scale


def quantised(matrices):
    """Blocks and scales of matrices [X, I, O] in float32, and the numbers that they stand for.

    Each number becomes the nearest of FP4, by the dtypes of another library.
    """
    turned = np.asarray(matrices, np.float32).swapaxes(1, 2)
    groups = turned.reshape(*turned.shape[:2], -1, GROUP)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    exponents = np.floor(np.log2(largest)) - 2  # the largest number of FP4 is 6 = 1.5 * 2 ** 2
    scales = np.exp2(exponents).astype(ml_dtypes.float8_e8m0fnu)
    numbers = np.clip(groups / scales.astype(np.float32), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    plain = numbers.astype(np.float32) * scales.astype(np.float32)
    codes = numbers.view(np.uint8) & 15
    blocks = np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4)
    return (
        blocks,
        np.ascontiguousarray(scales.view(np.uint8)[..., 0]),
        plain.reshape(turned.shape).swapaxes(1, 2),
    )


def write_both(source, packed, plain):
    """Folders of what model folder `source` holds: experts in MXFP4, and their numbers as bf16."""
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    for folder in (packed, plain):
        folder.mkdir()
        for name in ("config.json", "generation_config.json"):
            shutil.copy(source / name, folder)
    matrices = [name for name in tensors if name.endswith(("up_proj", "down_proj"))]
    small = {name: x for name, x in tensors.items() if name not in matrices}
    small = {name: x.astype(ml_dtypes.bfloat16) for name, x in small.items()}
    in_blocks, in_full = small.copy(), small.copy()
    for name in matrices:
        blocks, scales, numbers = quantised(tensors[name])
        in_blocks |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        in_full[name] = np.ascontiguousarray(numbers).astype(ml_dtypes.bfloat16)
    scales = {name: in_blocks.pop(name) for name in list(in_blocks) if name.endswith("_scales")}
    for folder, found in zip((packed, plain, packed), (in_blocks, in_full, scales), strict=True):
        save_file(found, folder / f"model-{len(found)}.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (packed / "config.json").write_text(json.dumps(config))
