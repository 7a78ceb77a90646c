"""Models of the transformers library on shared weights: the very models that the library gives."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from broker.errors import BindError, LoadFailed, UsageError
from engine_client import EngineClient
from engine_client.binding import binding_of
from engine_client.integrations.transformers import from_pretrained, weights_of
from tests.integrations.models import (
    ARCHITECTURES,
    IDS,
    assert_same,
    change,
    held,
    minilm,
    output,
    write,
)
from tests.processes.conftest import brokers, private_directory
from tests.support.clock import SCALE, eventually
from tests.support.engine import mapped_slabs
from tests.support.nursery import Nursery
from tests.support.processes import RunningBroker

SMOLLM2 = "SMOLLM2_FOLDER"


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers is an extra (transformers)")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take minutes for what takes seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def broker() -> Iterator[RunningBroker]:
    with private_directory() as directory, brokers(directory) as start:
        yield start()


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[EngineClient]:
    """Of this process; what a test leaves on the broker is evicted."""
    with broker.client(label="transformers") as client:
        yield client
    broker.evict_all()


# --- the same model ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_librarys_own_model(
    transformers: Any, client: EngineClient, tmp_path: Path, kind: str
) -> None:
    """Parameters, buffers, ties, dtypes, configuration and outputs are the library's, bit by bit;
    each stored tensor is shared, and another engine finds it there."""
    what = ARCHITECTURES[kind]
    write(transformers, tmp_path, what)
    asked = {"model_class": getattr(transformers, what.read)} if what.read else {}
    ours = from_pretrained(tmp_path, client=client, **asked, **what.options)
    library_class = getattr(transformers, what.read or what.written)
    assert_same(ours, library_class.from_pretrained(tmp_path, **what.options))
    again = from_pretrained(tmp_path, client=client, **asked, **what.options)
    assert weights_of(again).how == "resident"
    assert weights_of(again).set_id == weights_of(ours).set_id
    assert weights_of(ours).key.dtype == what.dtype
    for model in (ours, again):
        shared = binding_of(model).tensors  # type: ignore[union-attr]
        private = {name for name, p in model.named_parameters() if not shared.owns(p)}
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in private} <= what.own
        assert not any(
            p.requires_grad for name, p in model.named_parameters() if name not in private
        )


def test_real_weights(transformers: Any, client: EngineClient) -> None:
    """all-MiniLM-L6-v2, by the class that its config.json names and by an Auto class."""
    library = transformers.AutoModel.from_pretrained(minilm())
    assert_same(from_pretrained(minilm(), client=client), library)
    auto = from_pretrained(minilm(), client=client, model_class=transformers.AutoModel)
    assert_same(auto, library)


@pytest.mark.timeout(180 * SCALE)
def test_a_real_causal_model(transformers: Any, client: EngineClient) -> None:
    """SmolLM2, sharded, its tied head not stored: the same model, and the same greedy tokens."""
    folder = os.environ.get(SMOLLM2)
    if not folder:
        pytest.skip(f"${SMOLLM2} names no folder with SmolLM2-135M-Instruct")
    library = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours = from_pretrained(folder, client=client)
    assert_same(ours, library)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    asked = tokens("The capital of France is", return_tensors="pt")
    mine, theirs = (
        model.generate(**asked, max_new_tokens=8, do_sample=False) for model in (ours, library)
    )
    assert torch.equal(mine, theirs)
    assert " Paris" in tokens.decode(mine[0])


@pytest.mark.timeout(180 * SCALE)
def test_two_processes_one_copy(
    transformers: Any, broker: RunningBroker, client: EngineClient, nursery: Nursery
) -> None:
    """This process and another one use the same weights: their shares add up to one copy."""
    gc.collect()  # models of earlier tests
    before = mapped_slabs()["Pss"]
    other = nursery.engine(broker)
    other.tell("from_pretrained", path=str(minilm()))
    model = from_pretrained(minilm(), client=client)
    checksum = sum(float(parameter.double().sum()) for parameter in model.parameters())
    answer = other.answer(120)["ok"]
    assert answer["checksum"] == pytest.approx(checksum, rel=1e-9)
    assert answer["set"] == weights_of(model).set_id
    here, there = mapped_slabs()["Pss"] - before, other.ask("mapped")["Pss"]
    nbytes = weights_of(model).nbytes
    assert 0.45 * nbytes < here < 0.55 * nbytes
    assert 0.98 * nbytes < here + there <= 1.02 * nbytes
    other.close()


# --- dtypes --------------------------------------------------------------------------------------


def test_another_dtype_is_converted_once(
    transformers: Any, broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """A set of its own, by the loader, and resident for whoever asks next, however it is said."""
    write(transformers, tmp_path, ARCHITECTURES["tied head"])
    stored = from_pretrained(tmp_path, client=client)
    half = from_pretrained(tmp_path, client=client, dtype="bfloat16")
    loads = broker.counter("loads_started")
    again = from_pretrained(tmp_path, client=client, dtype=torch.bfloat16)
    library = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_same(again, library)
    assert weights_of(half).set_id == weights_of(again).set_id != weights_of(stored).set_id
    assert (weights_of(stored).key.dtype, weights_of(half).key.dtype) == ("float32", "bfloat16")
    assert weights_of(half).nbytes < weights_of(stored).nbytes
    assert broker.counter("loads_started") == loads


def test_the_configuration_decides_without_a_dtype(
    transformers: Any, client: EngineClient, tmp_path: Path
) -> None:
    """Weights stored in float32 of a model that is of bfloat16: converted, as the library does."""
    write(transformers, tmp_path, ARCHITECTURES["tied head"])
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))
    ours = from_pretrained(tmp_path, client=client)
    assert ours.dtype is torch.bfloat16
    assert_same(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path))


# --- options -------------------------------------------------------------------------------------


def test_options_reach_the_library(transformers: Any, client: EngineClient, tmp_path: Path) -> None:
    """What changes configuration, attention or generation does so; arguments of the class too."""
    write(transformers, tmp_path, ARCHITECTURES["names of old releases"])
    options = {
        "model_class": transformers.BertModel,
        "attn_implementation": "eager",
        "output_hidden_states": True,
        "add_pooling_layer": False,
    }
    ours = from_pretrained(tmp_path, client=client, **options)
    del options["model_class"]
    assert_same(ours, transformers.BertModel.from_pretrained(tmp_path, **options))
    assert ours.config._attn_implementation == "eager"
    assert ours.config.output_hidden_states is True
    assert ours.pooler is None


@pytest.mark.parametrize("auto", [False, True])
def test_options_reach_the_generation_configuration(
    transformers: Any, client: EngineClient, tmp_path: Path, auto: bool
) -> None:
    """Of a model's own class they do; an Auto class keeps what its configuration has taken."""
    write(transformers, tmp_path, ARCHITECTURES["tied head"])
    asked = transformers.AutoModelForCausalLM if auto else transformers.LlamaForCausalLM
    options: dict[str, Any] = {"output_attentions": True, "attn_implementation": "eager"}
    ours = from_pretrained(tmp_path, client=client, model_class=asked, **options)
    library = asked.from_pretrained(tmp_path, **options)
    assert ours.generation_config.to_dict() == library.generation_config.to_dict()
    assert ours.config.output_attentions is True


def test_a_configuration_of_ones_own(
    transformers: Any, client: EngineClient, tmp_path: Path
) -> None:
    """As an object or as another folder; it is not changed, and generation can be set as well."""
    write(transformers, tmp_path / "m", ARCHITECTURES["tied head"])
    config = transformers.AutoConfig.from_pretrained(tmp_path / "m", rms_norm_eps=0.5)
    before = config.to_dict()
    generation = transformers.GenerationConfig(max_new_tokens=3)
    options = {"config": config, "generation_config": generation}
    ours = from_pretrained(tmp_path / "m", client=client, **options)
    library = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "m", **options)
    assert_same(ours, library)
    assert ours.generation_config.max_new_tokens == 3
    assert config.to_dict() == before
    config.save_pretrained(tmp_path / "c")
    elsewhere = from_pretrained(tmp_path / "m", client=client, config=tmp_path / "c")
    assert elsewhere.config.rms_norm_eps == 0.5


# --- what a bound model can do ------------------------------------------------------------------


def test_moving_to_a_newer_generation(
    transformers: Any, client: EngineClient, tmp_path: Path
) -> None:
    """Stored under other names than the model's, and with running statistics among them."""
    what = ARCHITECTURES["running statistics"]._replace(rename=lambda name: f"old.{name}")
    mapping = {r"^old\.": ""}
    old, new = (write(transformers, tmp_path / str(seed), what, seed) for seed in (0, 1))
    change(new, lambda tensors: {n: t + 1 if "running" in n else t for n, t in tensors.items()})
    model = from_pretrained(old, client=client, name="m", key_mapping=mapping)
    wanted = from_pretrained(new, client=client, name="m", key_mapping=mapping)
    assert not torch.equal(output(model), output(wanted))
    weights_of(model).swap(model)
    for name, tensor in held(wanted).items():
        assert torch.equal(held(model)[name], tensor), name
    assert torch.equal(output(model), output(wanted))


def test_private_again(transformers: Any, client: EngineClient, tmp_path: Path) -> None:
    """A detached model can be trained; its ties are still ties."""
    write(transformers, tmp_path, ARCHITECTURES["tied head"])
    model = from_pretrained(tmp_path, client=client)
    weights_of(model).detach(model)
    model.train()
    model(IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        model.lm_head.weight += 1
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.grad is not None


def test_the_lease_ends_with_the_model(
    transformers: Any, broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """Nothing but the model's parameters keeps the weights."""
    write(transformers, tmp_path, ARCHITECTURES["tied head"])
    model = from_pretrained(tmp_path, client=client)
    (held_set,) = broker.status()["sets"]
    assert len(held_set["leases"]) == 1
    del model
    gc.collect()
    eventually(lambda: broker.status()["sets"][0]["leases"] == [], 5, "the lease's end")


def test_weights_of_another_model(transformers: Any) -> None:
    """Only models that came from here have shared weights."""
    with pytest.raises(UsageError, match="this int was not given by from_pretrained of ours"):
        weights_of(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="this Linear was not given by from_pretrained of ours"):
        weights_of(torch.nn.Linear(1, 1))


# --- weights that are not simply those that are stored ------------------------------------------


def t5_with_both_embeddings(
    transformers: Any, folder: Path, *, equal: bool, nan: bool = False
) -> Path:
    """The encoder's embedding is stored beside the one that it is tied to."""
    write(transformers, folder, ARCHITECTURES["parts kept in float32"])

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if nan:
            tensors["shared.weight"][0] = torch.nan
        twice = tensors["shared.weight"] + (0 if equal else 1)
        return {**tensors, "encoder.embed_tokens.weight": twice}

    change(folder, edit)
    return folder


def test_tied_and_stored_twice(transformers: Any, client: EngineClient, tmp_path: Path) -> None:
    """Equal bytes are one Parameter, as the library has it."""
    path = t5_with_both_embeddings(transformers, tmp_path, equal=True)
    ours = from_pretrained(path, client=client)
    assert ours.encoder.embed_tokens.weight is ours.shared.weight
    assert_same(ours, transformers.T5ForConditionalGeneration.from_pretrained(path))


@pytest.mark.parametrize("nan", [False, True])
def test_tied_but_stored_differently(
    transformers: Any, broker: RunningBroker, client: EngineClient, tmp_path: Path, nan: bool
) -> None:
    """One of the two would be lost without a word: refused, and no lease is left. NaN differs from
    itself, and the library unties then."""
    path = t5_with_both_embeddings(transformers, tmp_path, equal=nan, nan=nan)
    with pytest.raises(BindError, match="ties what is stored with different bytes") as refusal:
        from_pretrained(path, client=client)
    assert refusal.value.fields["tie_conflicts"] == [
        ["shared.weight", "encoder.embed_tokens.weight"]
    ]
    eventually(lambda: broker.status()["sets"][0]["leases"] == [], 5, "the lease's end")


def test_computed_weights_depend_on_how_they_were_asked_for(
    transformers: Any, client: EngineClient, tmp_path: Path
) -> None:
    """Experts merged in another dtype, or of a rewritten file, are another set."""
    path = write(transformers, tmp_path, ARCHITECTURES["merged experts"])
    model = from_pretrained(path, client=client)
    half = from_pretrained(path, client=client, dtype=torch.bfloat16)
    assert_same(half, transformers.MixtralForCausalLM.from_pretrained(path, dtype=torch.bfloat16))
    change(path, lambda tensors: {name: tensor + 1 for name, tensor in tensors.items()})
    rewritten = from_pretrained(path, client=client)
    assert_same(rewritten, transformers.MixtralForCausalLM.from_pretrained(path))
    sets = [weights_of(one) for one in (model, half, rewritten)]
    assert [one.how for one in sets] == ["published"] * 3
    assert len({one.set_id for one in sets}) == 3


def test_a_file_that_changes_while_it_is_computed(
    transformers: Any, broker: RunningBroker, client: EngineClient, tmp_path: Path
) -> None:
    """What came out is of neither file: nothing is published, and whoever waits is told."""
    path = write(transformers, tmp_path, ARCHITECTURES["merged experts"])

    class Touching(transformers.MixtralForCausalLM):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
            if path is not None:
                os.utime(Path(path) / "model.safetensors")
            return super().from_pretrained(path, *args, **kwargs)

    with pytest.raises(LoadFailed, match="was changed while it was loaded; ask again"):
        from_pretrained(path, client=client, model_class=Touching)
    assert broker.status()["sets"] == []


def test_the_files_decide_where_nothing_else_names_a_dtype(
    transformers: Any, client: EngineClient, tmp_path: Path
) -> None:
    """Stored in two dtypes: the library's first tensor decides, whatever the header's order is."""
    write(transformers, tmp_path, ARCHITECTURES["tied head"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dtype": None}))

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        # safetensors writes the wider dtype first: the norm is the header's first tensor
        return {n: t if n == "model.norm.weight" else t.half() for n, t in tensors.items()}

    change(tmp_path, edit)
    ours = from_pretrained(tmp_path, client=client)
    assert ours.dtype is torch.float16
    assert_same(ours, transformers.LlamaForCausalLM.from_pretrained(tmp_path))
