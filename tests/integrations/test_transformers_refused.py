"""What does not fit, or cannot be shared, is refused before the broker is asked for anything."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from broker.checkpoints.header import StoredTensor
from broker.errors import BadRequest, BindError, LoadFailed, UnsupportedQuantForIPCError, UsageError
from engine_client import EngineClient
from engine_client.integrations.transformers import from_pretrained
from engine_client.integrations.transformers.classes import Chosen, choose_class
from engine_client.integrations.transformers.options import READING, REFUSED, checked
from engine_client.integrations.transformers.skeleton import build_skeleton, building
from tests.integrations.models import ARCHITECTURES, change, write
from tests.support.memory import peak_of

NOBODY = EngineClient.__new__(EngineClient)
"""A client that nothing can be asked of."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is an extra (transformers)")


@pytest.fixture
def llama(transformers: Any, tmp_path: Path) -> Path:
    return write(transformers, tmp_path, ARCHITECTURES["tied head"])


def misfit(path: Path, **options: Any) -> BindError:
    with pytest.raises(BindError) as refusal:
        from_pretrained(path, client=NOBODY, **options)
    return refusal.value


# --- checkpoints that do not fit ----------------------------------------------------------------


def test_everything_that_does_not_fit_is_listed(llama: Path) -> None:
    """Missing, of another shape and left over: all of them in the error, in one sentence."""

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 16)
        return {**tensors, "stray": torch.zeros(1)}

    change(llama, edit)
    error = misfit(llama)
    assert error.fields["reason"] == "missing_parameter"
    assert error.fields["missing"] == ["model.norm.weight"]
    assert error.fields["unexpected"] == ["stray"]
    assert error.fields["mismatched"] == {
        "model.layers.0.mlp.up_proj.weight": {"module": "[24, 16]", "stored": "[5, 16]"}
    }
    assert error.sentence == (
        f"checkpoint '{llama}' does not fit LlamaForCausalLM: 1 missing: model.norm.weight; "
        "1 of another shape: model.layers.0.mlp.up_proj.weight (model: [24, 16], stored: [5, 16]); "
        "1 without a place in the model: stray. The library would fill these places with random "
        "numbers. Pass the class and the configuration that the weights were saved from, or "
        "key_mapping where only names differ"
    )


def test_a_shape_alone(llama: Path) -> None:
    """The word for programs says what kind of misfit it is."""
    config = llama / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "vocab_size": 40}))
    error = misfit(llama)
    assert error.fields["reason"] == "shape_mismatch"
    assert list(error.fields["mismatched"]) == ["model.embed_tokens.weight"]


def test_a_head_that_nobody_has_trained(transformers: Any, llama: Path) -> None:
    """A class with more layers than are stored would get random ones: refused."""
    error = misfit(llama, model_class=transformers.LlamaForSequenceClassification)
    assert error.fields["missing"] == ["score.weight"]


def test_random_weights_that_the_library_does_not_mind(transformers: Any, llama: Path) -> None:
    """A class may declare weights that need not be stored; if they are random, they are missing."""

    class Careless(transformers.LlamaForSequenceClassification):  # type: ignore[misc]
        _keys_to_ignore_on_load_missing = ("score",)

    assert misfit(llama, model_class=Careless).fields["missing"] == ["score.weight"]


def test_a_buffer_that_nobody_fills(transformers: Any, llama: Path) -> None:
    """One that need not be stored and is left as the memory was is missing, whatever is in it."""

    class Careless(transformers.LlamaForCausalLM):  # type: ignore[misc]
        _keys_to_ignore_on_load_missing = ("scale",)

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("scale", torch.randn(4))
            self.post_init()

    assert misfit(llama, model_class=Careless).fields["missing"] == ["scale"]


def test_one_model_is_built_at_a_time(transformers: Any, llama: Path) -> None:
    """The library changes the default dtype of the process while it builds: others wait."""
    others_wait = []

    class Watching(transformers.LlamaForCausalLM):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
            with ThreadPoolExecutor(1) as other:
                others_wait.append(not other.submit(building.acquire, blocking=False).result())
            return super().from_pretrained(*args, **kwargs)

    chosen = Chosen(Watching, transformers.LlamaConfig.from_pretrained(llama), {})
    build_skeleton(chosen, [])
    assert others_wait
    assert all(others_wait)


def test_nothing_is_allocated_for_parameters(transformers: Any) -> None:
    """A model of 8 GB is built with some MB, on a machine that may have less."""
    config = transformers.LlamaConfig(num_hidden_layers=8)
    with torch.device("meta"):
        wanted = transformers.LlamaForCausalLM(config).state_dict()
    stored = [StoredTensor(n, "float32", tuple(t.shape), 0, t.nbytes) for n, t in wanted.items()]
    assert sum(tensor.nbytes for tensor in stored) > 7e9
    chosen = Chosen(transformers.LlamaForCausalLM, config, {"dtype": "bfloat16"})
    skeleton, taken = peak_of(lambda: build_skeleton(chosen, stored))
    assert set(skeleton.names) == set(wanted)
    assert set(skeleton.dtypes.values()) == {torch.bfloat16}
    assert skeleton.model.model.rotary_emb.inv_freq.device.type == "cpu"
    assert taken < 200e6


# --- what cannot be shared ----------------------------------------------------------------------


def test_quantised_weights(llama: Path) -> None:
    """A method whose stored tensors do not suffice is refused before anything is built."""
    config = llama / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedQuantForIPCError, match=r"\[weight-broker:engine\].*gptq"):
        from_pretrained(llama, client=NOBODY)


def test_pickled_weights(transformers: Any, tmp_path: Path) -> None:
    """They are not looked at."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadFailed, match="pytorch_model"):
        from_pretrained(tmp_path, client=NOBODY)


def test_an_adapter(llama: Path) -> None:
    """The library would load the base model elsewhere and merge; here the two are kept apart."""
    (llama / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds an adapter; load its base model from here"):
        from_pretrained(llama, client=NOBODY)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_makes_no_sense(option: str) -> None:
    """Refused by its name, with the reason; said to be off, it is let through."""
    sentence = f"from_pretrained: {option} cannot be used with shared weights: {REFUSED[option]}"
    with pytest.raises(UsageError) as refusal:
        checked({option: "auto"})
    assert refusal.value.sentence == sentence
    assert checked({option: None}) == checked({option: False}) == {}


def test_options_about_reading() -> None:
    """They say how the library would read files; one that asks for pickles is refused."""
    assert checked(dict.fromkeys(READING, True)) == {}
    with pytest.raises(UsageError, match="only safetensors are loaded, never pickled weights"):
        checked({"use_safetensors": False})


# --- classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architectures", "said"),
    [(["NobodysModel"], "names NobodysModel"), (None, "names no class")],
)
def test_a_class_that_the_library_does_not_have(
    llama: Path, architectures: list[str] | None, said: str
) -> None:
    """The sentence says what config.json names, and what to pass."""
    config = llama / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "architectures": architectures}))
    with pytest.raises(UsageError, match=f"config.json {said}, and .* pass model_class"):
        from_pretrained(llama, client=NOBODY)


def test_an_auto_class_of_another_task(transformers: Any, llama: Path) -> None:
    """It has no class for such a model."""
    auto = transformers.AutoModelForImageClassification
    with pytest.raises(UsageError, match="AutoModelForImageClassification has no class for a"):
        from_pretrained(llama, client=NOBODY, model_class=auto)


def test_the_architecture_chosen_among_several(transformers: Any, tmp_path: Path) -> None:
    """Where an Auto class has several classes for a configuration, config.json decides."""
    for written in ("FunnelModel", "FunnelBaseModel"):
        transformers.FunnelConfig(architectures=[written]).save_pretrained(tmp_path)
        chosen = choose_class(tmp_path, transformers.AutoModel, {})
        assert chosen.model_class is getattr(transformers, written)


# --- files and code that the library would take -----------------------------------------------


def set_in_config(folder: Path, **values: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))


def test_weights_that_the_configuration_names(llama: Path) -> None:
    """The library would load that file and not the one with the usual name: refused by name."""
    set_in_config(llama, transformers_weights="other.safetensors")
    with pytest.raises(UsageError, match=r"transformers_weights .* names 'other.safetensors'"):
        from_pretrained(llama, client=NOBODY)


def test_a_file_that_the_library_would_not_read(llama: Path) -> None:
    """The broker would load the one file there is; the library finds none."""
    (llama / "model.safetensors").rename(llama / "weights.safetensors")
    with pytest.raises(UsageError, match=r"the library reads no others; name 'weights.safetensors"):
        from_pretrained(llama, client=NOBODY)


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": False}])
def test_code_beside_the_weights(
    transformers: Any, llama: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configuration whose class comes with the checkpoint is refused, and nobody is asked."""
    monkeypatch.setattr("builtins.input", lambda _said: pytest.fail("asked on the terminal"))
    set_in_config(llama, model_type="theirs", auto_map={"AutoConfig": "code.Config"})
    (llama / "code.py").write_text("raise SystemExit('run')")
    for model_class in (None, transformers.AutoModelForCausalLM):
        with pytest.raises(UsageError, match="such code is not run from here"):
            from_pretrained(llama, client=NOBODY, model_class=model_class, **options)


def test_types_that_the_library_does_not_take(llama: Path) -> None:
    """A path of bytes and a configuration in a dict are told with a sentence."""
    with pytest.raises(BadRequest, match=r"path has to be a str or a pathlib.Path, not bytes"):
        from_pretrained(cast(str, os.fsencode(llama)), client=NOBODY)
    with pytest.raises(BadRequest, match=r"config has to be a configuration .* not dict"):
        from_pretrained(llama, client=NOBODY, config={"model_type": "llama"})
    with pytest.raises(UsageError, match=r"model_class must be a class of the library, .* not str"):
        from_pretrained(llama, client=NOBODY, model_class="AutoModel")
    with pytest.raises(UsageError, match=r"model.safetensors is one file; give the folder"):
        from_pretrained(llama / "model.safetensors", client=NOBODY)


def test_no_client(llama: Path) -> None:
    """Its address is none either."""
    with pytest.raises(UsageError, match="client must be an EngineClient, not str"):
        from_pretrained(llama, client=cast(EngineClient, "simulated"))
