"""The model of lm-evaluation-harness: against plain loops, against lm_eval's own model, and in its runs."""

import importlib.metadata
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'coverage-lab[eval]'")

import lm_eval.__main__
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from coverage_lab.collectors.models import LoadedModel, load_model
from coverage_lab.errors import CoverageLabError
from coverage_lab.replay import harness
from coverage_lab.replay.harness import CoverageLM

PAGE, LAYERS, KV_HEADS, WINDOW = 8, 2, 2, 160
BOS, EOS, TURN = "<s>", "</s>", "<turn>"
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '\n' if loop.index > 1 else '' }}[{{ m.role }}] {{ m.content }}"
    "{% endfor %}{{ '\n[assistant]' if add_generation_prompt else '' }}"
)
HERON = "The heron stood in the shallow water and waited; nothing moved but the reeds. "
CONTEXTS = [HERON + "By noon it", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,", "water"]
CHOICES = [" had caught", " flew", " x"]
POLICY = "int4/coverage:0.85,page_size=1@query_head within quest/fixed:8,page_size=16@query_head"


def characters(bos: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character of ASCII, which may put a BOS before a text."""
    texts = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]  # a space and a newline
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate([BOS, EOS, TURN, *texts])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN],
        chat_template=CHAT,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model and its tokenizer."""
    torch.manual_seed(5)
    tokenizer = characters(bos=True)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=KV_HEADS,
        head_dim=16,
        max_position_embeddings=WINDOW,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    path = tmp_path_factory.mktemp("tiny") / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(directory: Path) -> LoadedModel:
    return load_model(str(directory), "float32", "cpu")


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", "float32", "cpu")


def model(loaded: LoadedModel, policy: str | None = None, **options: Any) -> CoverageLM:
    return CoverageLM(loaded, policy, **{"page_size": PAGE} | options)


def generate(lm: Any, contexts: list[str], **given: Any) -> list[str]:
    requests = [
        Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": 12} | given), i)
        for i, text in enumerate(contexts)
    ]
    return lm.generate_until(requests, disable_tqdm=True)


def likelihoods(lm: Any, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return lm.loglikelihood(requests, disable_tqdm=True)


@torch.inference_mode()
def plain_answer(loaded: LoadedModel, ids: list[int], most: int = 12) -> list[int]:
    """The greedy answer of the model itself, without a cache."""
    answer: list[int] = []
    while len(answer) < most:
        token = int(loaded.model(torch.tensor([ids + answer])).logits[0, -1].argmax())
        if token == loaded.tokenizer.eos_token_id:
            break
        answer.append(token)
    return answer


@torch.inference_mode()
def plain_likelihood(loaded: LoadedModel, ids: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The same from one forward call of the model itself."""
    logits = loaded.model(torch.tensor([ids + continuation])).logits[0, len(ids) - 1 : -1]
    scores = logits.double().log_softmax(-1)[torch.arange(len(continuation)), continuation]
    return float(scores.sum()), logits.argmax(-1).tolist() == continuation


# Against the model itself


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_all_pages_are_the_model_itself(name: str, request: pytest.FixtureRequest):
    loaded = request.getfixturevalue(name)
    tokenizer, (contexts, most) = loaded.tokenizer, (CONTEXTS, 12) if name == "tiny" else (CONTEXTS[:2], 4)
    answers = [plain_answer(loaded, tokenizer(text)["input_ids"], most) for text in contexts]
    assert len({tuple(ids) for ids in answers}) == len(contexts)
    pairs = [(context, choice) for context in CONTEXTS[:2] for choice in CHOICES[:2]]
    pairs.append((CONTEXTS[0], tokenizer.decode(answers[0][:4])))
    wanted = []
    for context, choice in pairs:
        ids = tokenizer(context)["input_ids"]
        wanted.append(plain_likelihood(loaded, ids, tokenizer(context + choice)["input_ids"][len(ids) :]))
    assert [greedy for _, greedy in wanted] == [False] * 4 + [True]
    for policy in (None, "exact/coverage:1"):
        lm = model(loaded, policy)
        said = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        assert generate(lm, contexts, max_gen_toks=most) == said
        found = likelihoods(lm, pairs)
        assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], abs=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
        assert lm.get_model_info()["reads"] == 1


def test_dropped_pages_change_answers(tiny: LoadedModel):
    dense, sparse = model(tiny), model(tiny, "exact/fixed:2")
    pairs = [(context, choice) for context in CONTEXTS[:2] for choice in CHOICES[:2]]
    for one, other in zip(likelihoods(dense, pairs), likelihoods(sparse, pairs), strict=True):
        assert abs(one[0] - other[0]) > 1e-3
    assert generate(dense, CONTEXTS[:2]) != generate(sparse, CONTEXTS[:2])
    # A short context has no page to drop.
    assert generate(dense, CONTEXTS[2:], max_gen_toks=4) == generate(sparse, CONTEXTS[2:], max_gen_toks=4)


def test_reads_are_those_of_all_steps(tiny: LoadedModel):
    lm = model(tiny, "exact/fixed:2")
    (answer,) = generate(lm, CONTEXTS[:1])
    likelihoods(lm, [(CONTEXTS[0], choice) for choice in CHOICES])
    context = 1 + len(CONTEXTS[0])
    positions = [context + step for length in (len(answer), *map(len, CHOICES)) for step in range(length - 1)]
    rows = LAYERS * KV_HEADS
    pages = rows * sum(position // PAGE + 1 for position in positions)
    assert lm.get_model_info() == {
        "policy": "exact/fixed:2",
        "page_size": PAGE,
        "backend": "reference",
        "reads": rows * 2 * len(positions) / pages,
        "pages_kept": rows * 2 * len(positions),
        "pages_seen": pages,
        "decode_steps": len(positions),
        "contexts_cut": 0,
        "model_device": "cpu",
        "model_dtype": "torch.float32",
        "model_revision": None,
        "model_weights": tiny.identity["weights"],
    }


def test_one_token_continuations_tell_nothing(tiny: LoadedModel, caplog: pytest.LogCaptureFixture):
    lm = model(tiny, "exact/fixed:2")
    pairs = [(CONTEXTS[0], choice) for choice in "abc"]
    assert likelihoods(lm, pairs) == likelihoods(model(tiny), pairs)
    assert lm.get_model_info()["reads"] is None
    assert "exact/fixed:2 took no part" in caplog.text
    # Steps of other requests are no excuse.
    generate(lm, CONTEXTS[:1])
    caplog.clear()
    likelihoods(lm, pairs)
    assert "exact/fixed:2 took no part" in caplog.text


def test_nothing_is_decoded_twice(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch):
    lm, read = model(tiny, "exact/fixed:2"), []
    prefill = lm.decoder.prefill
    monkeypatch.setattr(lm.decoder, "prefill", lambda prompts: read.append(prompts) or prefill(prompts))
    first, second = generate(lm, [CONTEXTS[0]] * 2)
    assert first == second
    assert len(read) == 1
    # One context for three choices of one token; steps write behind it, and it is read again.
    pairs = [(CONTEXTS[0], choice) for choice in ("a", "b", "cd", "e", "fg")]
    alone = [likelihoods(model(tiny, "exact/fixed:2"), [pair])[0] for pair in pairs]
    read.clear()
    assert likelihoods(lm, pairs) == alone
    assert len(read) == 2


# Stop strings and lengths


def test_until(tiny: LoadedModel):
    lm = model(tiny, "exact/fixed:2")
    (text,) = generate(lm, CONTEXTS[:1])
    assert len(text) == 12
    places = [place for place in range(2, 9) if text.find(text[place : place + 3]) == place]
    early, late = places[0], places[-1]
    stops = text[late : late + 3], text[early : early + 3]
    before = lm.get_model_info()["decode_steps"]
    assert generate(lm, CONTEXTS[:1], until=[stops[0]]) == [text[:late]]
    assert generate(lm, CONTEXTS[:1], until=stops[1]) == [text[:early]]
    assert generate(lm, CONTEXTS[:1], until=["", *stops, "zzz"]) == [text[:early]]
    steps = lm.get_model_info()["decode_steps"] - before
    assert steps == late + 2 + 2 * (early + 2)  # no more than it takes to see the stop string


class Script:
    """A decoder that says given tokens, whatever it reads."""

    policy, page_size, backend, reads = None, PAGE, "reference", (0, 0)

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self.tokens, self.vocabulary = tokens, vocabulary

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        self.said = iter(self.tokens)
        return self.step([])

    def step(self, tokens: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(self.said)]), self.vocabulary).float()


@pytest.mark.parametrize(
    ("said", "until", "answer"),
    [
        (f"one two{TURN}\nthree", [TURN], "one two"),
        (f"one two{TURN}\nthree", [f"{TURN}\n"], "one two"),
        (f"one{TURN}two", ["wo"], "onet"),
        (f"one two{EOS}three", ["zzz"], "one two"),
        (f"{EOS}three", ["zzz"], ""),
        ("one.two\nthree", ["\n", "."], "one"),
        ("one\n\ntwo", ["\n\n"], "one"),
    ],
)
def test_until_of_what_is_said(tiny: LoadedModel, said: str, until: list[str], answer: str):
    lm = model(tiny)
    tokens = tiny.tokenizer(said, add_special_tokens=False)["input_ids"]
    lm.decoder = Script(tokens, len(tiny.tokenizer))  # type: ignore[assignment]
    assert generate(lm, ["a"], until=until, max_gen_toks=len(tokens)) == [answer]


def test_most_tokens(tiny: LoadedModel):
    lm = model(tiny, max_gen_toks=7)
    (text,) = generate(lm, CONTEXTS[:1])
    assert len(text) == 12
    assert generate(lm, CONTEXTS[:1], max_gen_toks=5) == [text[:5]]
    assert generate(lm, CONTEXTS[:1], max_gen_toks=1) == [text[:1]]
    assert generate(lm, CONTEXTS[:1], max_gen_toks=None, max_new_tokens=4) == [text[:4]]
    assert generate(lm, CONTEXTS[:1], max_gen_toks=None) == [text[:7]]


def test_long_contexts_lose_their_beginning(tiny: LoadedModel, caplog: pytest.LogCaptureFixture):
    long = HERON * 3 + "and"
    for policy in (None, "exact/coverage:1"):
        lm = model(tiny, policy, max_length=80)
        ids = tiny.tokenizer(long)["input_ids"]
        assert generate(lm, [long]) == [tiny.tokenizer.decode(plain_answer(tiny, ids[-68:]))]
        ((value, _),) = likelihoods(lm, [(long, " then")])
        # The last token of a continuation is not fed.
        continuation = tiny.tokenizer(" then", add_special_tokens=False)["input_ids"]
        assert value == pytest.approx(plain_likelihood(tiny, ids[-76:], continuation)[0], abs=1e-4)
        assert lm.get_model_info()["contexts_cut"] == 2
    assert "2 contexts were cut from the left to fit in 80 tokens" in caplog.text
    assert model(tiny).max_length == WINDOW
    for lm, ask, message in (
        (lm, lambda lm: generate(lm, ["a"], max_gen_toks=80), "max_gen_toks 80 leaves no room for a context"),
        (lm, lambda lm: likelihoods(lm, [("a", "b" * 81)]), "a continuation of 81 tokens leaves no room"),
    ):
        with pytest.raises(CoverageLabError, match=message):
            ask(lm)
    assert len(likelihoods(lm, [("a", "b" * 80)])) == 1


# Tokens


def test_exactly_one_bos(tiny: LoadedModel):
    lm = model(tiny)
    for text in ("water", f"{BOS}water"):
        assert lm.tok_encode(text) == tiny.tokenizer(text.removeprefix(BOS))["input_ids"]
        assert lm.tok_encode(text, add_special_tokens=True) == lm.tok_encode(text)
    assert lm.tok_encode("water", add_special_tokens=False) == lm.tok_encode("water")[1:]
    talk = [{"role": "user", "content": "water"}]
    text = lm.apply_chat_template(talk)
    assert text == f"{BOS}[user] water\n[assistant]"
    assert lm.tok_encode(text).count(0) == 1
    begun = lm.apply_chat_template([*talk, {"role": "assistant", "content": "It"}], False)
    assert begun == f"{BOS}[user] water\n[assistant] It"
    assert lm.chat_template(True) == CHAT
    assert lm.tokenizer_name


def test_no_bos_of_its_own(tiny: LoadedModel):
    loaded = LoadedModel(tiny.model, characters(bos=False), tiny.layers, (), {})
    lm = model(loaded)
    assert lm.tok_encode("water") == loaded.tokenizer("water", add_special_tokens=False)["input_ids"]
    # An empty context is one BOS, or else EOS.
    ids = lm.tok_encode("water")
    for token in (lm.prefix_token_id, loaded.tokenizer.eos_token_id):
        assert lm.prefix_token_id == token
        value = plain_likelihood(loaded, [token], ids)[0]
        assert likelihoods(lm, [("", "water")])[0][0] == pytest.approx(value, abs=1e-4)
        assert generate(lm, [""]) == [loaded.tokenizer.decode(plain_answer(loaded, [token]))]
        loaded.tokenizer.bos_token = None
    loaded.tokenizer.eos_token = None
    with pytest.raises(CoverageLabError, match="neither BOS nor EOS"):
        likelihoods(lm, [("", "water")])


def test_system_messages_where_the_template_knows_none(tiny: LoadedModel):
    tokenizer = characters(bos=True)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT
    )
    lm = model(LoadedModel(tiny.model, tokenizer, tiny.layers, (), {}))
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "water"}]
    assert lm.apply_chat_template(talk) == f"{BOS}[user] water\n[assistant]"
    tokenizer.chat_template = None
    with pytest.raises(CoverageLabError, match="no chat template; leave out --apply_chat_template"):
        lm.apply_chat_template(talk)


# Refusals


@pytest.mark.parametrize(
    "given", [{"do_sample": True}, {"temperature": 0.7}, {"do_sample": False, "num_beams": 4}]
)
def test_sampling_is_refused(tiny: LoadedModel, given: dict[str, Any]):
    with pytest.raises(CoverageLabError, match="the task samples or searches") as error:
        generate(model(tiny), CONTEXTS, **given)
    assert "\n" not in str(error.value)


def test_a_temperature_that_is_not_used_is_not_refused(tiny: LoadedModel):
    # As the LongBench tasks of lm_eval have it.
    lm = model(tiny)
    assert generate(lm, CONTEXTS, do_sample=False, temperature=1) == generate(lm, CONTEXTS)


def test_rolling_is_refused(tiny: LoadedModel):
    with pytest.raises(CoverageLabError, match="loglikelihood_rolling reads whole texts at once"):
        model(tiny).loglikelihood_rolling([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "mvar/coverag:0.9"}, "unknown budget 'coverag'; did you mean 'coverage'"),
        ({"policy": "dense"}, "policy 'dense' is not of the form"),
        ({"pretrained": "smolm2"}, "unknown model 'smolm2'; did you mean 'smollm2'"),
        ({"pretrained": None}, "no model is named; try --model_args pretrained=smollm2"),
        ({"dense_layers": "0-1"}, "unknown model argument 'dense_layers'.* a comma within a policy is .* ;"),
        (
            {"page_size": "16@query_head"},
            "page_size=16@query_head is no whole number.* policy is written as ;",
        ),
        ({"page_size": 24}, "page size 24 is not a power of two"),
        ({"max_length": WINDOW + 1}, f"max_length {WINDOW + 1} is more than the model's window of {WINDOW}"),
        ({"max_gen_toks": 0}, "max_gen_toks=0 is no whole number from 1 on"),
        ({"policy": "mvar/coverage:0.9", "backend": "triton"}, "the kernels can't run mvar/coverage:0.9"),
    ],
)
def test_bad_arguments_are_one_line(tiny: LoadedModel, arguments: dict[str, Any], message: str):
    with pytest.raises(CoverageLabError, match=message) as error:
        CoverageLM(**{"pretrained": tiny} | arguments)
    assert "\n" not in str(error.value)


def test_empty_continuations_are_refused(tiny: LoadedModel):
    with pytest.raises(CoverageLabError, match="the continuation '' has no token of its own"):
        likelihoods(model(tiny), [("water", "")])


def test_the_command_line_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail() -> None:
        raise CoverageLabError("unknown model 'smolm2'")

    def unreachable() -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nto load the files.")

    for command, wanted in (
        (fail, "error: unknown model 'smolm2'\n"),
        (
            unreachable,
            "error: We couldn't connect to 'https://huggingface.co' to load the files; tasks that load the "
            "tokenizer for themselves need pretrained=DIRECTORY\n",
        ),
    ):
        monkeypatch.setattr(lm_eval.__main__, "cli_evaluate", command)
        with pytest.raises(SystemExit) as exit_:
            harness.main()
        assert exit_.value.code == 2
        assert capsys.readouterr().err == wanted


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    spec = importlib.util.spec_from_file_location("fresh", harness.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(CoverageLabError, match=r"needs lm_eval .*; pip install 'coverage-lab\[eval\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    with pytest.raises(SystemExit, match=r"error: this needs lm_eval"):
        runpy.run_module("coverage_lab.replay.harness", run_name="__main__")


def test_importing_the_package_loads_no_lm_eval():
    code = "import sys, coverage_lab.cli, coverage_lab.replay; assert 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# In lm_eval


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("pretrained=DIR,policy=mvar/coverage:0.98", "mvar/coverage:0.98"),
        ("pretrained=DIR,policy=,page_size=16", "dense"),
        ("pretrained=DIR", "dense"),
        ("pretrained=DIR,policy=mvar/coverage:0.98;dense_layers=0-1", "mvar/coverage:0.98,dense_layers=0-1"),
        ("policy=" + POLICY.replace(",", ";") + ",pretrained=DIR", POLICY),
        (json.dumps({"pretrained": "DIR", "policy": POLICY}), POLICY),
    ],
)
def test_model_args(directory: Path, text: str, policy: str, monkeypatch: pytest.MonkeyPatch):
    text = text.replace("DIR", str(directory))
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "coverage_lab", "--model_args", text])
    given = HarnessCLI().parse_args().model_args
    lm = get_model("coverage_lab").create_from_arg_obj(given, {"device": "cpu", "batch_size": 1})
    assert lm.get_model_info()["policy"] == policy
    if not text.startswith("{"):  # which only the command line takes
        lm = get_model("coverage_lab").create_from_arg_string(text, {"device": None})
        assert lm.get_model_info()["policy"] == policy


def test_arguments_go_before_those_of_the_command_line(directory: Path, monkeypatch: pytest.MonkeyPatch):
    given = {"pretrained": str(directory), "device": "cpu"}
    assert CoverageLM.create_from_arg_obj(given, {"device": "cuda:0"}).loaded.model.device.type == "cpu"
    # Where there is no GPU, the command line names one all the same.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CoverageLM(str(directory), device="cuda:0").loaded.model.device.type == "cpu"
    with pytest.raises(CoverageLabError, match="device 'cuda:1' is not available"):
        CoverageLM(str(directory), device="cuda:1")


@pytest.fixture
def placeholder() -> Iterator[None]:
    """What releases of lm_eval that look for entry points have in place of the class."""
    (point,) = importlib.metadata.entry_points(group="lm_eval.models", name="coverage_lab")
    held = model_registry._objs.pop("coverage_lab")
    model_registry.register("coverage_lab", target=point)
    yield
    model_registry._objs["coverage_lab"] = held


def test_entry_point(placeholder: None):
    assert get_model("coverage_lab") is CoverageLM
    assert get_model("hf") is HFLM  # lm_eval's own models are still found


def write_tasks(root: Path) -> Path:
    """Write two tasks and their rows into a directory."""
    rows = [
        {"text": HERON + question, "answer": answer, "choices": [answer, "a mill", "x"], "label": 0}
        for question, answer in (("It is", "the bird"), ("By noon it", "had gone"), ("Reeds", "moved"))
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {root / 'rows.jsonl'}\n"
    head = f"{data}test_split: test\ndoc_to_text: '{{{{text}}}}'\n"
    (root / "said.yaml").write_text(
        f"task: said\n{head}output_type: generate_until\ndoc_to_target: '{{{{answer}}}}'\n"
        "generation_kwargs:\n  until: ['zzz']\n  max_gen_toks: 6\n  do_sample: false\n  temperature: 1\n"
        "metric_list:\n  - metric: exact_match\n"
    )
    (root / "chosen.yaml").write_text(
        f"task: chosen\n{head}output_type: multiple_choice\ndoc_to_choice: '{{{{choices}}}}'\n"
        "doc_to_target: label\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    return root


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # read when it was imported
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return write_tasks(tmp_path)


def evaluate(lm: Any, tasks: Path, **options: Any) -> Any:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(lm, tasks=["said", "chosen"], task_manager=manager, bootstrap_iters=0, **options)


def responses(results: Any) -> list[Any]:
    return [row["resps"] for task in ("said", "chosen") for row in results["samples"][task]]


@pytest.mark.parametrize(
    ("name", "chat", "policy"),
    [
        ("tiny", False, None),
        ("tiny", False, "exact/coverage:1"),
        ("tiny", True, "exact/coverage:1"),
        ("smollm2", True, "exact/coverage:1"),
    ],
)
def test_scores_are_those_of_the_model_of_lm_eval(
    name: str, chat: bool, policy: str | None, tasks: Path, request: pytest.FixtureRequest
):
    loaded = request.getfixturevalue(name)
    theirs = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer)
    options: dict[str, Any] = {"apply_chat_template": chat, "limit": 1 if name == "smollm2" else None}
    own, found = (evaluate(lm, tasks, **options) for lm in (theirs, model(loaded, policy)))
    assert found["results"] == own["results"]
    for row, wanted in zip(found["samples"]["said"], own["samples"]["said"], strict=True):
        assert (row["arguments"], row["resps"]) == (wanted["arguments"], wanted["resps"])
    for row, wanted in zip(found["samples"]["chosen"], own["samples"]["chosen"], strict=True):
        assert row["arguments"] == wanted["arguments"]
        for ((value, greedy),), ((other, same),) in zip(row["resps"], wanted["resps"], strict=True):
            assert value == pytest.approx(other, abs=1e-4)
            assert greedy == same


def test_run_under_a_policy(directory: Path, tasks: Path):
    given = {"pretrained": str(directory), "policy": "exact/fixed:2", "page_size": PAGE}
    sparse = evaluate("coverage_lab", tasks, model_args=given, device="cpu")
    config = sparse["config"]
    assert config["model_args"] == given
    assert (config["policy"], config["page_size"], config["backend"]) == ("exact/fixed:2", PAGE, "reference")
    assert 0.1 < config["reads"] == config["pages_kept"] / config["pages_seen"] < 0.3
    assert config["decode_steps"] == 3 * 5 + sum(
        len(choice) for choice in ("the bird", "had gone", "moved")
    ) + 3 * len("a mill") + 3 * len("x")
    dense = evaluate("coverage_lab", tasks, model_args=f"pretrained={directory}", device="cpu")
    assert dense["config"]["policy"] == "dense"
    assert responses(dense) != responses(sparse)


@pytest.mark.slow
def test_command_line(directory: Path, tasks: Path):
    given = f"pretrained={directory},policy=exact/fixed:2;dense_layers=1,page_size={PAGE}"
    command = [sys.executable, "-m", "coverage_lab.replay.harness", "--model", "coverage_lab"]
    command += ["--model_args", given, "--tasks", "said,chosen", "--include_path", str(tasks)]
    run = subprocess.run(
        [*command, "--output_path", str(tasks / "out")],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HOME": str(tasks / "home"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "|chosen|" in run.stdout
    assert "exact/fixed:2,dense_layers=1 read " in run.stderr
    (path,) = tasks.glob("out/**/results_*.json")
    config = json.loads(path.read_text())["config"]
    assert config["policy"] == "exact/fixed:2,dense_layers=1"
    assert config["model_device"] == "cpu"
    assert 0.5 < config["reads"] < 0.7  # one of two layers is read whole
