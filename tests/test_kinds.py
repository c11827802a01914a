"""Kinds of models: adapted, quantised, spread over devices, in half precision, compiled, in a pipeline.

Each gives what its own plain `generate` gives, or is refused in one sentence before anything is computed.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM, LogitsProcessorList, pipeline

import specheads
from specheads import SpeculativeConfig, SpeculativeGenerationMixin
from specheads.drafters.draft_model import DraftModelDrafter
from specheads.evaluation.divergence import divergences
from specheads.evaluation.runs import timed_run
from specheads.packing import PackedLinear, unpack
from specheads.target import SlotRunner

from .exactness.head_loop import random_head
from .exactness.test_greedy import prompt
from .heads.perfect import CYCLE, cyclic_target, perfect_eagle, perfect_medusa
from .pretended import FIRST, HOST, SECOND, devices
from .test_generate import letters
from .tiny import perturbed, tiny

# PEFT asks transformers by a name that it is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

DRAFT = {"draft_tokens": 4, "adaptive": False}
TREE = {**DRAFT, "tree_nodes": 9}
GREEDY = {"max_new_tokens": 20, "do_sample": False}
BATCHES = (1, 4)


def assert_same(model: Any, settings: Any = None, **arguments: Any) -> list[Tensor]:
    """Speculative text is that of the model's own plain `generate`, alone and in a padded batch. Returns the plain one."""
    expected, accepted = [], 0
    for batch in BATCHES:
        inputs = prompt("llama", batch)
        plain = model.generate(**inputs, **GREEDY)
        out = model.generate(**inputs, **GREEDY, **arguments, speculative=settings or DRAFT, return_dict_in_generate=True)
        assert torch.equal(plain, out.sequences)
        expected.append(plain)
        accepted += out.speculation.num_accepted_draft_tokens
    assert accepted, "nothing was drafted that held, so nothing was tried"
    return expected


def differ(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return not all(map(torch.equal, ours, theirs))


def plain_texts(model: Any) -> list[Tensor]:
    return [model.generate(**prompt("llama", batch), **GREEDY) for batch in BATCHES]


# ---- adapters (PEFT)

TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft")


def trained(model: Any, seed: int = 1, amount: float = 0.4) -> Any:
    """Gives what an adapter would learn values that change the text."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(amount * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


def with_lora(peft: Any, base: Any, seed: int = 1, **options: Any) -> Any:
    return trained(peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=TARGETS, **options)), seed)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_lora_counts_while_it_is_on(task: str | None, peft: Any) -> None:
    without = plain_texts(tiny())
    model = with_lora(peft, specheads.enable(tiny()), task_type=task)
    first = assert_same(model)
    assert differ(first, without)
    assert_same(model, assistant_model=perturbed(tiny(), 0.05))
    with model.disable_adapter():
        assert not differ(assert_same(model), without)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=TARGETS))
    model.set_adapter("second")
    second = assert_same(trained(model, seed=2))
    assert differ(second, first) and differ(second, without)
    model.set_adapter("default")
    assert not differ(assert_same(model), first)
    merged = model.merge_and_unload()
    assert isinstance(merged, SpeculativeGenerationMixin)
    assert not differ(assert_same(merged), first)


@pytest.mark.parametrize("kind", ["dora", "ia3", "loha"])
def test_other_adapters(kind: str, peft: Any) -> None:
    config = {
        "dora": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "loha": lambda: peft.LoHaConfig(r=2, target_modules=TARGETS),
    }[kind]()
    assert differ(assert_same(trained(peft.get_peft_model(specheads.enable(tiny()), config))), plain_texts(tiny()))


def test_lora_on_an_encoder_decoder(peft: Any) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    model = trained(peft.get_peft_model(specheads.enable(tiny("t5")), config))
    inputs = prompt("t5", 4)
    plain = model.generate(**inputs, **GREEDY)
    assert torch.equal(plain, model.generate(**inputs, **GREEDY, speculative=DRAFT))


def test_transformers_own_adapters(peft: Any) -> None:
    model = specheads.enable(tiny())
    try:
        model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    except ValueError as error:
        pytest.skip(str(error))  # transformers asks for a newer PEFT
    adapted = assert_same(trained(model))
    model.disable_adapters()
    without = assert_same(model)
    assert differ(adapted, without) and not differ(without, plain_texts(tiny()))


def test_enable_and_disable_take_a_peft_model(peft: Any) -> None:
    model = with_lora(peft, tiny())
    assert specheads.enable(model, draft_tokens=3) is model
    assert isinstance(model.get_base_model(), SpeculativeGenerationMixin)
    assert_same(model, True)
    assert specheads.disable(model) is model
    assert type(model.get_base_model()) is LlamaForCausalLM


def test_a_peft_model_as_the_draft(peft: Any) -> None:
    target, draft = specheads.enable(tiny()), trained(with_lora(peft, tiny()), amount=0.05)
    assert_same(target, assistant_model=draft)
    assert_same(specheads.enable(target, drafter=draft, **DRAFT), True)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_learned_prompts_are_refused(kind: str, peft: Any) -> None:
    """They stand in `prepare_inputs_for_generation` at every step, which speculative passes do not go through."""
    base = specheads.enable(tiny())
    model = peft.get_peft_model(base, getattr(peft, kind)(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    model = trained(model.double())
    inputs = prompt("llama", 1)
    expected = plain_texts(tiny())
    with pytest.raises(ValueError, match="prepare_inputs_for_generation"):
        model.generate(**inputs, **GREEDY, speculative=DRAFT)
    assert model.generate(**inputs, **GREEDY).shape[1] > 11
    assert not differ(assert_same(base), expected), "the model itself is as it was"


def test_adapters_by_row_are_refused(peft: Any) -> None:
    model = with_lora(peft, specheads.enable(tiny()), task_type="CAUSAL_LM")
    names = ["default", "__base__", "default", "__base__"]
    with pytest.raises(ValueError, match="in its own way"):
        model.generate(**prompt("llama", 4), **GREEDY, adapter_names=names, speculative=DRAFT)


def test_activated_lora_is_refused(peft: Any) -> None:
    """It counts the tokens to adapt from the end of a pass, whose length drafts change."""
    end = prompt("llama", 1)["input_ids"][0, -2:].tolist()
    model = with_lora(peft, specheads.enable(tiny()), task_type="CAUSAL_LM", alora_invocation_tokens=end)
    with pytest.raises(ValueError, match="in its own way"):
        model.generate(**prompt("llama", 1), **GREEDY, speculative=DRAFT)


def test_lora_over_packed_weights(peft: Any) -> None:
    model = with_lora(peft, specheads.enable(tiny().float(), pack_for_cpu=True))
    assert any(type(layer) is PackedLinear for layer in model.modules())
    packed = assert_same(model)
    unpack(model)
    assert not differ(packed, plain_texts(model))


@pytest.mark.parametrize("way", ["merge_adapter", "merge_and_unload"])
def test_packed_weights_follow_a_merge(way: str, peft: Any) -> None:
    """PEFT writes through `weight.data`, which leaves the weight's version as it was."""
    base = specheads.enable(tiny().float(), pack_for_cpu=True)
    without = plain_texts(base)
    model = with_lora(peft, base)
    merged = getattr(model, way)() or model
    texts = assert_same(merged)
    unpack(merged)
    assert differ(texts, without) and not differ(texts, plain_texts(merged))


# ---- quantised weights


def loaded(folder: Path, model: Any = None, **arguments: Any) -> Any:
    (tiny().float() if model is None else model).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float, **arguments}).eval()


def torchao_config(name: str, **arguments: Any) -> Any:
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(pytest.importorskip("torchao.quantization"), name)(**arguments))


def test_torchao_weights(tmp_path: Path) -> None:
    model = loaded(tmp_path, quantization_config=torchao_config("Int8WeightOnlyConfig"))
    assert type(model.model.layers[0].mlp.down_proj.weight) is not nn.Parameter
    assert_same(specheads.enable(model))


def test_activations_quantised_over_the_whole_pass_are_refused(tmp_path: Path) -> None:
    per_tensor = importlib.import_module("torchao.quantization").PerTensor() if has("torchao") else None
    config = torchao_config("Int8DynamicActivationInt8WeightConfig", granularity=per_tensor)
    with pytest.raises(ValueError, match="whole pass"):
        specheads.enable(loaded(tmp_path, quantization_config=config))


def test_packing_leaves_quantised_weights_alone(tmp_path: Path) -> None:
    model = loaded(tmp_path, quantization_config=torchao_config("Int8WeightOnlyConfig"))
    with pytest.warns(UserWarning, match="1 of 15"):
        specheads.enable(model, pack_for_cpu=True)
    assert_same(model)


class RoundedLinear(nn.Linear):
    """A layer whose weights are kept as small integers, with a scale for each row."""

    @classmethod
    def of(cls, layer: nn.Linear, levels: int) -> nn.Linear:
        rounded = copy.deepcopy(layer)
        with torch.no_grad():
            scale = layer.weight.abs().amax(dim=1, keepdim=True) / levels
            rounded.weight.copy_((layer.weight / scale).round() * scale)
        rounded.__class__ = cls
        return rounded


def rounded_target(dense: Any, levels: int) -> Any:
    """The target with the weights of its layers rounded, as weight-only quantisation does."""
    target = copy.deepcopy(dense)
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            target.set_submodule(name, RoundedLinear.of(module, levels))
    return target


def torchao_target(dense: Any, folder: Path) -> Any:
    return loaded(folder, dense, quantization_config=torchao_config("Int8WeightOnlyConfig"))


HEADS = ["medusa", "eagle 1", "eagle 3"]


@pytest.mark.parametrize("quantised", ["rounded", "torchao"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_head_of_the_dense_model_drafts_for_its_quantised_form(kind: str, quantised: str, tmp_path: Path) -> None:
    """The text is the quantised model's, which is not the dense one's; from a folder, as a head is loaded."""
    dense = tiny().float()
    random_head(dense, kind).save_pretrained(tmp_path / "head")
    target = torchao_target(dense, tmp_path / "target") if quantised == "torchao" else rounded_target(dense, 8)
    with pytest.warns(UserWarning, match="fewer drafts may be accepted"):
        specheads.enable(target, drafter=str(tmp_path / "head"))
    texts = assert_same(target, TREE)
    if quantised == "rounded":
        assert differ(texts, plain_texts(dense))


@pytest.mark.parametrize("kind", ["medusa", "eagle 3"])
def test_what_a_head_loses_by_quantisation_is_measured(kind: str) -> None:
    """A head that knows the dense model by heart: all is accepted there, less by a form that says some things otherwise."""
    dense = cyclic_target()
    head = perfect_medusa(dense) if kind == "medusa" else perfect_eagle(dense)
    inputs = {"input_ids": torch.tensor([CYCLE])}
    coarse = copy.deepcopy(dense)
    with torch.no_grad():  # stands for a rounding after which two tokens of the seven go on otherwise
        coarse.lm_head.weight[[CYCLE[1], CYCLE[4]]] = dense.lm_head.weight[[CYCLE[4], CYCLE[1]]]
    lengths = []
    for target in (dense, coarse):
        specheads.enable(target, drafter=specheads.load_drafter(head, target, with_suffix=False))
        plain = target.generate(**inputs, **GREEDY)
        out = target.generate(**inputs, **GREEDY, speculative=DRAFT, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        lengths.append(out.speculation.mean_acceptance_length)
    assert lengths[0] > 3 > lengths[1]


def bitsandbytes_model(folder: Path, **arguments: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    base = tiny(hidden_size=64, intermediate_size=128, head_dim=16).float()
    return loaded(folder, base, quantization_config=BitsAndBytesConfig(**arguments), device_map="cpu")


@pytest.mark.parametrize(
    "arguments",
    [
        {"load_in_8bit": True, "llm_int8_threshold": 0.0},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float},
    ],
)
def test_bitsandbytes(arguments: dict[str, Any], tmp_path: Path) -> None:
    assert_same(specheads.enable(bitsandbytes_model(tmp_path, **arguments)))


def test_outliers_over_the_whole_pass_are_refused(tmp_path: Path) -> None:
    """A column that is large for one token is computed in half precision for all tokens of the pass."""
    model = bitsandbytes_model(tmp_path, load_in_8bit=True)
    with pytest.raises(ValueError, match="llm_int8_threshold=0"):
        specheads.enable(model)


def test_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    write_gguf(gguf, tmp_path / "model.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float).eval()
    assert_same(specheads.enable(model))


def write_gguf(gguf: Any, path: Path) -> None:
    """A small Llama in blocks of eight bits."""
    writer, generator, kind = gguf.GGUFWriter(path, "llama"), torch.Generator().manual_seed(0), gguf.GGMLQuantizationType.Q8_0
    sizes = {"block_count": 2, "context_length": 256, "embedding_length": 32, "feed_forward_length": 64, "head_count": 4}
    sizes |= {"head_count_kv": 2, "layer_norm_rms_eps": 1e-6, "rope_dimension_count": 8, "vocab_size": 32}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    tensors = {"token_embd": (32, 32), "output": (32, 32)}
    tensors |= {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    for name, shape in tensors.items():
        weight = 0.3 * torch.randn(shape, generator=generator)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm", "blk.1.attn_norm", "blk.1.ffn_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


# ---- devices


@pytest.fixture
def places() -> Iterator[None]:
    with devices():
        yield


# Each operation takes a detour.
SHORT = {**GREEDY, "max_new_tokens": 9}


def on(place: torch.device, batch: int, family: str = "llama") -> dict[str, Tensor]:
    return {name: value.to(place) for name, value in prompt(family, batch).items()}


@pytest.mark.parametrize("settings", [DRAFT, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("place", [HOST, FIRST, SECOND], ids=str)
def test_a_draft_on_another_device(place: torch.device, settings: dict[str, Any], places: None) -> None:
    target, draft = specheads.enable(tiny()).to(FIRST), perturbed(tiny(), 0.05).to(place)
    for batch in BATCHES:
        inputs = on(FIRST, batch)
        out = target.generate(**inputs, **SHORT, speculative=settings, assistant_model=draft)
        assert out.device == FIRST
        assert torch.equal(out.cpu(), tiny().generate(**prompt("llama", batch), **SHORT))
        sampled = {**inputs, "max_new_tokens": 5, "do_sample": True, "eos_token_id": None}
        assert target.generate(**sampled, speculative=settings, assistant_model=draft).shape == (batch, 16)


def test_an_encoder_decoder_and_its_draft_on_two_devices(places: None) -> None:
    target, draft = specheads.enable(tiny("t5")).to(FIRST), perturbed(tiny("t5"), 0.05).to(SECOND)
    out = target.generate(**on(FIRST, 4, "t5"), **SHORT, speculative=DRAFT, assistant_model=draft)
    assert torch.equal(out.cpu(), tiny("t5").generate(**prompt("t5", 4), **SHORT))


@pytest.mark.parametrize("drafter", ["none", "lookup", "suffix", "recycling", "auto"])
def test_drafters_work_on_the_targets_device(drafter: str, places: None) -> None:
    target = specheads.enable(tiny()).to(FIRST)
    for settings in (DRAFT, TREE):
        out = target.generate(**on(FIRST, 4), **SHORT, speculative={**settings, "drafter": drafter})
        assert torch.equal(out.cpu(), tiny().generate(**prompt("llama", 4), **SHORT))


def test_a_tensor_left_on_the_wrong_device_is_noticed(places: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(self: Any, context: Any, lines: Any, drafted: Tensor, logits: Tensor) -> Tensor:
        return self.processors([context.rows[line] for line in lines], drafted, logits)

    monkeypatch.setattr(DraftModelDrafter, "scores", scores)  # without its `.to(context.device)`
    target, draft = specheads.enable(tiny()).to(FIRST), perturbed(tiny(), 0.05).to(SECOND)
    with pytest.raises(RuntimeError, match="xla:0 and xla:1"):
        target.generate(**on(FIRST, 4), **SHORT, speculative=TREE, assistant_model=draft)


PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")


def spread(model: Any) -> Any:
    """A model with one layer on each of two devices, as `accelerate` would place it."""
    hooks = importlib.import_module("accelerate.hooks")
    for index, part in enumerate(PARTS):
        place = FIRST if index < 3 else SECOND
        hooks.add_hook_to_module(model.get_submodule(part).to(place), hooks.AlignDevicesHook(execution_device=place))
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(execution_device=FIRST, io_same_device=True))
    return model


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("place", [HOST, FIRST, SECOND], ids=str)
def test_a_target_on_two_devices(place: torch.device, batch: int, family: str, places: None) -> None:
    target = specheads.enable(spread(tiny(family)))
    # Processors hold tensors where the ids are, so there the scores must be.
    arguments = {**SHORT, "min_new_tokens": 6, "suppress_tokens": [31], "repetition_penalty": 1.2}
    expected = tiny(family).generate(**prompt(family, batch), **arguments)
    for settings in ({**TREE, "drafter": "auto"}, {**DRAFT, "drafter": "recycling"}):
        out = target.generate(**on(place, batch, family), **arguments, speculative=settings)
        assert out.device == place
        assert torch.equal(out.cpu(), expected)


OFFLOADED = {"some": ("model.layers.1", "lm_head"), "all": tuple(part for part in PARTS if part != "model.rotary_emb")}


@pytest.mark.parametrize("what", OFFLOADED)
def test_weights_on_disk(what: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    device_map = {part: "disk" if part in OFFLOADED[what] else "cpu" for part in PARTS}
    arguments = {"device_map": device_map, "offload_folder": tmp_path / "offloaded", "dtype": torch.double}
    model = loaded(tmp_path, tiny(), **arguments)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    assert not differ(assert_same(specheads.enable(model)), plain_texts(tiny()))
    assert_same(specheads.enable(tiny()), assistant_model=model)


# ---- half precision

# A few units in the last place of these models' scores, which are below 8.
NEAR_TIE = {torch.bfloat16: 0.15, torch.float16: 0.02}


def largest_gap(model: Any) -> float:
    """How far from a tie the target was at the worst first difference between speculative and plain text."""
    gaps = [0.0]
    for seed in range(4):
        for batch in BATCHES:
            inputs = prompt("llama", batch)
            fresh = torch.randint(3, 12, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
            inputs["input_ids"] = fresh * inputs["attention_mask"]
            plain = timed_run(model, inputs, 0, **GREEDY, eos_token_id=None)
            other = timed_run(model, inputs, 0, **GREEDY, eos_token_id=None, speculative=TREE)
            assert other.speculation.num_accepted_draft_tokens
            found = divergences(model, inputs, plain, other)
            assert all(each.gap is not None for each in found)
            gaps += [each.gap for each in found if each.gap is not None]
    return max(gaps)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
@pytest.mark.parametrize("dtype", NEAR_TIE, ids=str)
def test_half_precision_differs_at_near_ties_only(dtype: torch.dtype, family: str) -> None:
    assert largest_gap(specheads.enable(tiny(family).to(dtype))) <= NEAR_TIE[dtype]


@pytest.mark.parametrize("dtype", NEAR_TIE, ids=str)
def test_wrong_positions_are_no_near_tie(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = SlotRunner.extend
    monkeypatch.setattr(
        SlotRunner, "extend", lambda self, tokens, depths, visible: extend(self, tokens, depths + (depths > 0).long(), visible)
    )
    assert largest_gap(specheads.enable(tiny().to(dtype))) > 5 * NEAR_TIE[dtype]


# ---- compiled


class Counter:
    """A compiler that compiles nothing and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiler() -> Iterator[Counter]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=32):
        yield Counter()
    torch._dynamo.reset()


@pytest.mark.parametrize("way", ["forward", "in place"])
def test_compiled_passes(way: str, compiler: Counter) -> None:
    model = specheads.enable(tiny())
    if way == "forward":
        model.forward = torch.compile(model.forward, backend=compiler, fullgraph=True)
    else:
        model.compile(backend=compiler)
    inputs = prompt("llama", 4)
    expected = tiny().generate(**inputs, **GREEDY)
    counts = []
    for _ in range(2):
        for settings in ({**TREE, "drafter": "auto"}, {**DRAFT, "drafter": "suffix"}):
            assert torch.equal(expected, model.generate(**inputs, **GREEDY, speculative=settings))
        counts.append(compiler.graphs)
    assert 0 < counts[0] == counts[1] <= 12, "compiled once for each kind of pass"


def test_enable_takes_a_compiled_module() -> None:
    module = torch.compile(tiny(), backend="eager")
    assert specheads.enable(module) is module
    assert not differ(assert_same(module), plain_texts(tiny()))
    specheads.disable(module)
    assert type(module._orig_mod) is LlamaForCausalLM


# ---- pipelines and generation configs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The speculative calls made."""
    import specheads.mixin as mixin

    made: list[Any] = []
    run = mixin.run
    monkeypatch.setattr(mixin, "run", lambda call: (made.append(call), run(call))[1])
    return made


def pipe(**arguments: Any) -> Any:
    tokenizer = letters()
    tokenizer.pad_token, tokenizer.padding_side = "a", "left"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return pipeline("text-generation", model=specheads.enable(tiny()), tokenizer=tokenizer, **arguments)


CHAT = [{"role": "user", "content": "defgdefg"}]
REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": ("defghijkdefgh", {}),
    "texts": (["defghijkdefgh", "lmnol"], {}),
    "batch": (["defghijkdefgh", "lmnol", "jkjkjk"], {"batch_size": 3}),
    "chat": (CHAT, {}),
    "chats": ([CHAT, [{"role": "user", "content": "kl"}]], {"batch_size": 2}),
    "stop": ("defghijkdefgh", {"stop_sequence": "c"}),
    "config": ("defghijkdefgh", {"generation_config": GenerationConfig(**GREEDY)}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_pipelines(name: str, calls: list[Any]) -> None:
    request, arguments = REQUESTS[name]
    arguments = arguments if "generation_config" in arguments else {**GREEDY, **arguments}
    expected = pipe()(request, **arguments)
    assert not calls
    assert pipe()(request, **arguments, speculative=DRAFT) == expected
    asked = len(calls)
    assert pipe(speculative=DRAFT)(request, **arguments) == expected
    assert 0 < asked == len(calls) - asked


def test_a_pipelines_assistant_is_the_draft(calls: list[Any]) -> None:
    text = "defghijkdefgh"
    assisted = pipe(assistant_model=perturbed(tiny(), 0.05))
    assert assisted(text, **GREEDY, speculative=True) == pipe()(text, **GREEDY)
    assert isinstance(calls[0].drafter, DraftModelDrafter)


def asked_for(calls: list[Any]) -> list[int]:
    """How many tokens each call was to draft."""
    return [call.context.config.draft_tokens for call in calls]


SETTINGS = {"bool": True, "dict": {"draft_tokens": 5}, "config": SpeculativeConfig(draft_tokens=5)}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_generation_config_can_ask_for_it(name: str, calls: list[Any]) -> None:
    value = SETTINGS[name]
    model, inputs = specheads.enable(tiny(), draft_tokens=5), prompt("llama", 2)
    expected = model.generate(**inputs, **GREEDY)
    assert not calls
    assert torch.equal(expected, model.generate(**inputs, generation_config=GenerationConfig(**GREEDY, speculative=value)))
    assert torch.equal(expected, model.generate(inputs["input_ids"], GenerationConfig(**GREEDY, speculative=value)))
    model.generation_config.speculative = value
    for given in (GREEDY, {"generation_config": GenerationConfig(**GREEDY)}):
        assert torch.equal(expected, model.generate(**inputs, **given))
    assert asked_for(calls) == [5] * 4


def test_what_is_nearer_to_the_call_counts(calls: list[Any]) -> None:
    model, inputs = specheads.enable(tiny()), prompt("llama", 1)
    model.generation_config.speculative = {"draft_tokens": 5}
    given = GenerationConfig(**GREEDY, speculative={"draft_tokens": 3})
    model.generate(**inputs, generation_config=given)
    model.generate(**inputs, generation_config=given, speculative={"draft_tokens": 2})
    assert asked_for(calls) == [3, 2]
    model.generate(**inputs, **GREEDY, speculative=False)
    model.generate(**inputs, generation_config=GenerationConfig(**GREEDY, speculative=False))
    assert len(calls) == 2


@pytest.mark.parametrize("name", SETTINGS)
def test_a_generation_config_keeps_it_on_disk(name: str, tmp_path: Path, calls: list[Any]) -> None:
    model = tiny()
    # What stems from a model's config and not from a file drops entries that it does not know when it is loaded.
    model.generation_config._from_model_config = False
    model.generation_config.speculative = SETTINGS[name]
    model.save_pretrained(tmp_path)
    again = specheads.enable(LlamaForCausalLM.from_pretrained(tmp_path), draft_tokens=5)
    inputs = prompt("llama", 1)
    assert torch.equal(again.generate(**inputs, **GREEDY), again.generate(**inputs, **GREEDY, speculative=False))
    assert asked_for(calls) == [5]
    assert pipeline("text-generation", model=again, tokenizer=letters())("defg", **GREEDY) and len(calls) == 2


def test_own_processors_in_a_pipeline(calls: list[Any]) -> None:
    rule = LogitsProcessorList([lambda ids, scores: scores + (ids[:, -1:] == torch.arange(scores.shape[1]))])
    expected = pipe()("defgdefg", **GREEDY, logits_processor=rule)
    assert pipe()("defgdefg", **GREEDY, logits_processor=rule, speculative=DRAFT) == expected
