"""The adapter to verl against verl's own FSDP2 engine, in verl's virtual environment: `make verl`.

Without verl only what needs none of it runs: packed rows, and the sentence that says what is missing.
"""

import asyncio
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
HERE = importlib.util.find_spec("verl") is not None
with_verl = pytest.mark.skipif(not HERE, reason="verl has a virtual environment of its own: make verl")


@pytest.mark.skipif(HERE, reason="verl is installed")
def test_without_verl_a_sentence_says_how_to_get_it() -> None:
    import train.integrations.verl

    with pytest.raises(ModuleNotFoundError, match=r"integrations\.verl\.EngineConfig needs verl .* `make verl`"):
        _ = train.integrations.verl.EngineConfig
    assert not hasattr(train.integrations.verl, "no_such_name")


def test_a_microbatch_is_one_packed_row() -> None:
    from train.integrations.verl.batches import jagged, packed_row

    def nested(*rows: list[int]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    micro = {"input_ids": nested([5, 6, 7], [8, 9]), "position_ids": nested([0, 1, 2], [0, 1])}
    micro["temperature"] = torch.tensor([0.5, 2.0])
    row = packed_row(micro, 3, multiple=4)
    assert row["tokens"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert row["labels"].tolist() == [[6, 7, -100, 9, -100, -100, -100, -100]]
    assert row["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0, 0, 0]]
    assert row["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert row["temperature"].tolist() == [[0.5, 0.5, 0.5, 2.0, 2.0, 1.0, 1.0, 1.0]]
    assert row["number"].tolist() == [[3] * 8]
    assert [one.tolist() for one in jagged(row["tokens"], micro).unbind()] == [[5, 6, 7], [8, 9]]
    with pytest.raises(NotImplementedError, match="position_ids have 3 dimensions"):
        packed_row(micro | {"position_ids": torch.zeros(2, 3, 4)}, 0)
    with pytest.raises(NotImplementedError, match="multi_modal_inputs"):
        packed_row(micro | {"multi_modal_inputs": [{"pixels": 1}]}, 0)


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the rollout, whose server uses little of verl and Ray: without them names of theirs stand in."""
    import train.integrations.verl

    names: dict[str, tuple[str, ...]] = (
        {}
        if HERE
        else {
            "ray": (),
            "verl": (),
            "verl.workers": (),
            "verl.workers.rollout": (),
            "verl.workers.rollout.base": ("_ROLLOUT_REGISTRY", "BaseRollout"),
            "verl.workers.rollout.replica": ("RolloutReplica", "RolloutReplicaRegistry", "TokenOutput"),
        }
    )
    for name, attributes in names.items():
        module = ModuleType(name)
        vars(module).update((attribute, type(attribute, (SimpleNamespace,), {})) for attribute in attributes)
        monkeypatch.setitem(sys.modules, name, module)
    if not HERE:  # undone, the module is gone again from both places
        monkeypatch.setattr(train.integrations.verl, "rollout", None, raising=False)
        monkeypatch.setitem(sys.modules, "train.integrations.verl.rollout", None)
        del sys.modules["train.integrations.verl.rollout"]
    return importlib.import_module("train.integrations.verl.rollout")


def server_of(rollout: Any, **values: Any) -> Any:
    """A server without its thread."""
    from fnmodels import llama

    server = rollout.Server.__new__(rollout.Server)
    vars(server).update(config=llama.Config(31, 16, 24, 2, 2, 1), images=None, weights=None, _arriving=[])
    vars(server).update({"_requests": rollout.Arrivals(), "_replaced": False} | values)
    return server


def test_weights_arrive_after_a_sender_that_failed(rollout: Any) -> None:
    import params as P
    from fnmodels import tree
    from train.handover.bucket import buckets

    server = server_of(rollout)
    config = server.config
    first, second = (list(buckets(P.export(config, P.init(config, seed)), 2000)) for seed in (0, 1))
    for bucket in first[:2]:
        server.receive(bucket, 1)
    for bucket in second:
        server.receive(bucket, 2)
    _, params, version = server.weights
    assert version == 2
    want = tree.flatten(P.init(config, 1))
    assert all(torch.equal(leaf, want[path]) for path, leaf in tree.flatten(params).items())


def test_a_closed_server_hands_requests_back(rollout: Any) -> None:
    """Those that wait and those that come, until it is told to go on."""
    import asyncio

    import train
    from train.generation.requests import Request

    server = server_of(rollout, _closed=False)
    waits = server._requests.add(Request([1], 2, train.Sampling()))
    server.close()
    for found in (waits.result(), asyncio.run(server.generate("a", [1], {}))):
        assert (found.token_ids, found.stop_reason) == ([], "aborted")
    server.resume_generation()
    server._request = lambda *_: made.append(1) or Request([1], 2, train.Sampling())
    made = list[int]()

    async def asked() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(server.generate("a", [1], {}), 0.01)

    asyncio.run(asked())
    assert made == [1]


def test_a_request_joins_answers_under_way(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short one ends before a long one that began alone; callers that have gone end nothing; later weights wait."""
    import params as P
    import train
    from train.generation.batching import ContinuousBatch
    from train.generation.requests import Request

    sizes = SimpleNamespace(max_num_seqs=4, max_model_len=64)
    server = server_of(rollout, settings=sizes)
    config, params = server.config, P.init(server.config, 0)
    server.weights = config, params, 7
    prompts, lengths = ([1, 2, 3], [4, 5], [6], [7, 8]), (30, 2, 5, 3)
    made = [
        Request(list(p), n, train.Sampling(), 0, row) for row, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    long = server._requests.add(made[0])
    gone = server._requests.add(made[2])
    assert gone.cancel()
    futures, ended, steps = [long], list[int](), 0
    advance = ContinuousBatch.advance

    def advanced(batch: Any, **how: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            futures.append(server._requests.add(made[1]))
            futures[1].add_done_callback(lambda _: ended.append(1))
        if steps == 12:
            server._replaced = True
            futures.append(server._requests.add(made[3]))
        return advance(batch, **how)

    monkeypatch.setattr(ContinuousBatch, "advance", advanced)
    long.add_done_callback(lambda _: ended.append(0))
    running: dict[int, Any] = {}
    server._serve(running)
    assert ended == [1, 0] and not running and len(server._requests) == 1 and not futures[2].done()
    for row in (0, 1):
        found = futures[row].result()
        alone = train.serve(params, config, [made[row]], slots=1, capacity=64)
        assert found.token_ids == [event.token for event in alone] and len(found.token_ids) == lengths[row]
        assert found.extra_fields == {"global_steps": 7, "finish_reason": "max_new"}


def test_vllms_experts_become_the_routing_of_a_row() -> None:
    from tests.support.cases import cases
    from train.generation.routing import expert_layers
    from train.integrations.verl.batches import packed_row
    from train.integrations.verl.routing import layers_of, routing_of

    config = next(case.config for case in cases() if case.name == "deepseek_v3")  # whose first layer is dense
    layers, k = expert_layers(config), 2
    assert 0 < len(layers) < config.num_hidden_layers
    draw = torch.Generator().manual_seed(0)
    recorded = [torch.rand(n, len(layers), 8, generator=draw).argsort(-1)[..., :k] for n in (4, 2)]  # but the last
    padded = [
        torch.cat((layers_of(one, config), torch.zeros(1, config.num_hidden_layers, k, dtype=torch.int16)))
        for one in recorded
    ]
    assert all(one.dtype == torch.int16 and not one[:, 0].any() for one in padded)

    def nested(*rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    micro = {
        "input_ids": nested(torch.arange(5), torch.arange(3)),
        "position_ids": nested(torch.arange(5), torch.arange(3)),
    }
    micro["routed_experts"] = nested(*padded)
    row = packed_row(micro, 0, multiple=6, replays=config)["routing"]
    assert row.dtype == torch.int64 and row.shape == (1, 12, len(layers), k)
    assert torch.equal(row[0, :4], recorded[0]) and torch.equal(row[0, 5:7], recorded[1])
    assert row[0, [4, 7]].tolist() == [[[0, 1]] * len(layers)] * 2
    assert "routing" not in packed_row(micro, 0)
    holes = [one.clone() for one in padded]
    holes[0][1] = 0
    for wrong, words in (
        (nested(*holes), "sequence 0 has no experts at token 1, and has some behind it"),
        (nested(*(one[:, 1:] for one in padded)), "all 3 layers|must be .tokens, layers, k"),
        (nested(padded[0][:4], padded[1]), "of 8 tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            routing_of(micro | {"routed_experts": wrong}, config)
    del micro["routed_experts"]
    with pytest.raises(ValueError, match="enable_rollout_routing_replay=True"):
        routing_of(micro, config)


def test_sharing_takes_the_fields_of_a_strategy() -> None:
    from train.integrations.verl.settings import mesh_and_strategy

    mesh, strategy = mesh_and_strategy(SimpleNamespace(mesh="tp=2", sharing={"sequence": True}), 2)
    assert mesh.tp == 2 and strategy.sequence and strategy.rows == "own"
    for name in ("foo", "rows"):
        with pytest.raises(ValueError, match=f"engine.sharing has {name}, which fnmodels does not set; it has gather"):
            mesh_and_strategy(SimpleNamespace(mesh="tp=2", sharing={name: True}), 2)


def test_a_setting_that_is_not_honoured_must_have_its_default() -> None:
    from train.integrations.verl.settings import check_supported

    @dataclasses.dataclass
    class Settings:
        needed: Any
        strict: bool = True
        later: int = 0
        load_contents: tuple[str, ...] = ("model", "optimizer", "extra")

    given = {"hf_config_path": "a", "path": "a", "override_config": {}, "tiled_mlp": {}, "mtp": None}
    model = dataclasses.make_dataclass("Model", given)(**given)
    check_supported(model, None, None, Settings(None))
    faults = [({"strict": False}, "strict is False"), ({"later": 1}, "later is 1"), ({"needed": 1}, "needed is 1")]
    for wrong, said in faults:
        with pytest.raises(NotImplementedError, match=f"checkpoint.{said}, which fnmodels does not have"):
            check_supported(model, None, None, Settings(**{"needed": None} | wrong))


@with_verl
def test_a_setting_of_the_rollout_that_would_change_answers_is_refused() -> None:
    from verl.workers.config import RolloutConfig
    from verl.workers.config.model import MtpConfig

    from train.integrations.verl.settings import check_rollout

    def rollout(**more: Any) -> Any:
        return RolloutConfig(name="fnmodels", engine_kwargs=more.pop("engine_kwargs", {"vllm": {}}), **more)

    check_rollout(rollout(gpu_memory_utilization=0.9, enforce_eager=True, val_kwargs=None, n=4))
    check_rollout(rollout(engine_kwargs={"vllm": {"swap_space": 1}}))  # of another engine
    wrong: dict[str, Any] = {"quantization": "fp8", "logprobs_mode": "raw_logprobs", "limit_images": 2}
    for name, value in wrong.items():
        with pytest.raises(NotImplementedError, match=f"rollout.{name} is {value!r}, which fnmodels does not have"):
            check_rollout(rollout(**{name: value}))
    nested = {"engine_kwargs": {"fnmodels": {"slots": 3}}, "mtp": MtpConfig(enable=True, enable_rollout=True)}
    words = ("engine_kwargs.fnmodels.slots is 3", "mtp.enable_rollout is True")
    for (name, value), said in zip(nested.items(), words, strict=True):
        with pytest.raises(NotImplementedError, match=said):
            check_rollout(rollout(**{name: value}))


def support(name: str) -> Any:
    """The module tests/support/NAME.py; verl installs a package `tests` of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/support/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`Runs` of tests/support/verl_runs.py: what verl_flow.py finds, and other programs."""
    made = support("verl_runs").Runs(tmp_path_factory.mktemp("verl"))
    yield made
    made.close()


def check_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *outputs: str) -> None:
    found = support("verl_runs").differences(ours, theirs, *outputs)
    bounds = {"weights": 1e-4, "lr": 1e-12} | dict.fromkeys((*outputs, "loss"), 5e-6)
    assert not {name: found[name] for name, bound in bounds.items() if not found[name] <= bound}
    for one, other in zip(ours[0]["steps"], theirs[0]["steps"], strict=True):
        if "grad_norm" in one:  # fp32 rounds a norm of 20 to 2e-6
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], abs=5e-6, rel=1e-6)


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2", "tp=2", "cp=2", "pp=2", "ep=2"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "qwen3_moe", "lfm2"])
def test_every_mesh_is_verls_own_engine(run: Any, model: str, mesh: str) -> None:
    if mesh == "ep=2" and model != "qwen3_moe":
        pytest.skip("ep is for models with experts")
    check_equal(*run.pair(model, mesh), "log_probs", "entropy")


@with_verl
def test_weights_show_a_gradient_that_is_slightly_wrong(run: Any) -> None:
    """An entropy bonus that is a hundredth too large, in 4 of the 13 updates."""
    ours = run("llama", strategy="fnmodels", mesh="", entropy=0.0101)
    found = support("verl_runs").differences(ours, run("llama", strategy="fsdp2"))
    assert found["weights"] > 1e-4


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2", "tp=2"])
def test_a_critic_is_verls_own(run: Any, mesh: str) -> None:
    theirs = run("critic", strategy="fsdp2", kind="value_model")
    ours = run("critic", 2 if mesh else 1, strategy="fnmodels", kind="value_model", mesh=mesh)
    check_equal(ours, theirs, "values")


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_a_resumed_engine_goes_on_bit_for_bit(run: Any, mesh: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "fnmodels", "mesh": mesh}
    processes = 2 if mesh else 1
    through = run("llama", processes, **settings)[0]
    again = run("llama", processes, **settings, resume=through["saved"])[0]
    assert len(again["steps"]) == 5
    for one, other in zip(again["steps"], through["steps"][-5:], strict=True):
        assert all(one[name] == other[name] for name in ("loss", "grad_norm", "lr"))
    assert all(torch.equal(tensor, again["after"][name]) for name, tensor in through["after"].items())


LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


@with_verl
def test_adapters_train_alone_and_the_base_is_the_reference(run: Any) -> None:
    (plain,), (found,) = run("llama", strategy="fnmodels"), run("llama", strategy="fnmodels", model=LORA)
    for one, other in zip(plain["log_probs"], found["reference"], strict=True):
        assert torch.equal(one, other)
    moved = {name for name, tensor in found["after"].items() if not torch.equal(tensor, found["before"][name])}
    assert moved and all(name.endswith(("q_proj.weight", "down_proj.weight")) for name in moved)


@with_verl
@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2", "pp=2"])
def test_adapters_over_a_mesh_are_those_of_one_process(run: Any, mesh: str) -> None:
    """The last step is of mini-batches, which are other ones where ranks have rows of their own."""
    single, found = (run("llama", n, strategy="fnmodels", mesh=m, model=LORA) for n, m in ((1, ""), (2, mesh)))
    joined = support("verl_runs").joined
    for name in ("log_probs", "reference"):
        for one, other in zip(joined(found, name), joined(single, name), strict=True):
            torch.testing.assert_close(one, other, atol=5e-6, rtol=0)
    for one, other in zip(found[0]["steps"][:9], single[0]["steps"][:9], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=5e-6)
        assert one.get("grad_norm", 0.0) == pytest.approx(other.get("grad_norm", 0.0), abs=5e-6, rel=1e-6)


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_bf16_has_fp32_master_weights(run: Any, mesh: str) -> None:
    plain = run("llama", strategy="fnmodels")[0]
    found = run("llama", 2 if mesh else 1, strategy="fnmodels", mesh=mesh, dtype="bfloat16")[0]
    losses = [[step["loss"] for step in one["steps"]] for one in (plain, found)]
    for one, other in zip(losses[0][:5], losses[1][:5], strict=True):
        assert other == pytest.approx(one, rel=2e-2) and other != one


@with_verl
def test_what_is_asked_of_each_role_is_done_or_refused_in_a_sentence(run: Any, tmp_path: Path) -> None:
    """Settings without a meaning here, a forward-only engine's steps, adapters' seeds and memory, temperatures."""
    support("verl_flow").write_model("llama", tmp_path / "model")
    program = [ROOT / "tests/support/verl_roles.py", "alone", tmp_path / "model", tmp_path]
    found = json.loads(run.program(program, 1).splitlines()[-1])
    for setting, said in found["refusals"].items():
        section, fields = json.loads(setting)
        where = r"(fnmodels|train\.integrations\.verl)\b"
        assert re.match(rf"NotImplementedError: {section}\.{next(iter(fields))}\b.*{where}", said), (setting, said)
    reference = found["forward_only"]
    for name in ("optimizer_step", "lr_scheduler_step"):
        assert reference[name].startswith("RuntimeError: engine.forward_only is true"), reference[name]
    assert reference["changed"] > 0.5 and reference["restored"] == 0.0
    assert reference["other"].startswith("MismatchError")  # an actor's step has an optimizer state too
    assert found["adapters"] == {"same": True, "other": False, "shared": True}
    assert found["temperatures"]["functions"] <= 2
    assert found["determinism"] == [False, True]


@with_verl
def test_ranks_agree_on_microbatches_under_the_budget(run: Any, tmp_path: Path) -> None:
    program = [ROOT / "tests/support/verl_roles.py", "ranks", tmp_path, tmp_path]
    for rows, few, long, numbers, tokens in json.loads(run.program(program, 2).splitlines()[-1])["ranks"]:
        assert sorted(rows) == [[0], [1], [2]]  # one rank alone would need one row
        assert few == "ValueError: max_token_len_per_gpu needs 3 microbatches on a rank, and one has 2 sequences."
        assert long.endswith("has 9 tokens; max_token_len_per_gpu allows 8.")
        assert sorted(numbers) == [[0, 1], [2, 3]] and max(tokens) <= 32  # force_group_size is 2


@with_verl
def test_a_rollout_answers_as_generate_does(tmp_path: Path) -> None:
    """Requests that come while others run, greedy and drawn; weights that come later; refusals."""
    import params as P
    import train
    from train.handover.bucket import buckets
    from train.integrations.verl.rollout import Server

    support("verl_flow").write_model("llama", tmp_path / "model")
    config, first = P.load_pretrained(tmp_path / "model", copy=True)
    second = P.init(config, 1)
    fields = {"prompt_length": 8, "response_length": 6, "max_model_len": None, "max_num_seqs": 2, "dtype": "float32"}
    settings = SimpleNamespace(**fields, ignore_eos=True, free_cache_engine=True)
    prompts, plain = [[5, 6, 7], [8], [9, 10], [11, 12, 13, 14]], {"temperature": 0.0, "logprobs": True}

    async def answers(server: Server, **more: Any) -> list[Any]:
        calls = [server.generate(str(i), prompt, plain | more) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*calls)

    server = Server(str(tmp_path / "model"), settings, seed=3)
    with pytest.raises(RuntimeError, match="has no weights yet"):
        asyncio.run(answers(server))
    for version, params in enumerate((first, second)):
        for bucket in buckets(P.export(config, params), 4096):
            server.receive(bucket, version)
        found = asyncio.run(answers(server))
        wanted = train.generate(params, config, prompts, max_new=6, sampling=train.Sampling(temperature=0.0))
        assert [one.token_ids for one in found] == wanted.tokens
        for one, logp in zip(found, wanted.logp, strict=True):
            assert one.log_probs == pytest.approx(logp.tolist(), abs=1e-5)
            assert one.extra_fields["global_steps"] == version
    short = asyncio.run(answers(server, max_tokens=2, temperature=1.3, top_k=5))
    assert [len(one.token_ids) for one in short] == [2] * 4
    again = asyncio.run(answers(server, temperature=1.0))
    assert [one.token_ids for one in again] != [one.token_ids for one in asyncio.run(answers(server, temperature=1.0))]
    nothing = {"max_tokens": None, "top_k": -1, "top_p": None, "min_p": None, "stop_token_ids": None, "n": 1}
    nothing |= {"repetition_penalty": None, "presence_penalty": None, "stop": None, "ignore_eos": None, "min_tokens": 0}
    plainly = asyncio.run(answers(server))
    for absent in (nothing, nothing | {"top_k": None, "logprobs": None}, {"top_k": 0, "max_new_tokens": 6, "stop": []}):
        assert [one.token_ids for one in asyncio.run(answers(server, **absent))] == [one.token_ids for one in plainly]
    first_words = [one.token_ids[0] for one in plainly]
    ended = asyncio.run(answers(server, stop_token_ids=first_words, ignore_eos=True))
    assert [len(one.token_ids) for one in ended] == [1] * 4
    for wrong in ({"bad_words": 7}, {"n": 2}, {"stop": ["x"]}, {"min_tokens": 3}):
        with pytest.raises(NotImplementedError, match=f"has {next(iter(wrong))}=.*, which"):
            asyncio.run(answers(server, **wrong))
    for wrong in ({"max_tokens": 0}, {"top_p": 1.5}, {"repetition_penalty": -1.0}):
        with pytest.raises(ValueError, match=r"max_tokens=0; an answer|Sampling: (top_p|repetition) is"):
            asyncio.run(answers(server, **wrong))
    with pytest.raises(ValueError, match="The prompt has 14 tokens; the rollout has room for 14"):
        asyncio.run(server.generate("long", list(range(14)), plain))
    with pytest.raises(ValueError, match=r"Token 1 of the prompt of request .* is 1000000; token ids are"):
        asyncio.run(server.generate("unknown", [1, 10**6], plain))
    with pytest.raises(NotImplementedError, match="reads none for a llama"):
        asyncio.run(server.generate("picture", [1], plain, image_data=[object()]))
    with pytest.raises(NotImplementedError, match="has videos or sounds; the rollout takes text and images"):
        asyncio.run(server.generate("video", [1], plain, video_data=[object()]))
    server.sleep()
    with pytest.raises(RuntimeError, match="has no weights yet"):
        asyncio.run(answers(server))


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2", "tp=2", "cp=2", "pp=2", "ep=2"])
def test_an_engine_replays_the_experts_of_the_rollout(run: Any, tmp_path: Path, mesh: str) -> None:
    """Scores, losses and gradients are those of the rollout's experts: in one process bit for bit."""
    support("verl_flow").write_model("qwen3_moe", tmp_path / "model")
    program = [ROOT / "tests/support/verl_replay.py", tmp_path / "model", tmp_path / "out", mesh]
    found = json.loads(run.program(program, 2 if mesh else 1).splitlines()[-1])
    assert found["missing"].startswith("ValueError: The batch has no routed_experts")
    assert found["dense"].startswith("ValueError: engine.router_replay.mode is R3, and a llama has no experts")
    assert found["without"] > 1e-3  # other experts than the engine's own
    assert found["log_probs"] <= (3e-6 if mesh else 0.0) and found["norm"] < 1e-5
    assert found["other_bits"] == 0  # elements of gradients, in one process


@with_verl
def test_main_ppo_learns_with_this_engine_and_rollout(tmp_path: Path) -> None:
    toy = support("verl_toy")
    support("verl_flow").write_model("llama", tmp_path / "model")
    toy.write_task(tmp_path, tmp_path / "model")
    text = toy.printed(toy.command(tmp_path, tmp_path / "model", steps=15), tmp_path)
    scores, apart = (toy.logged(text, n) for n in ("critic/score/mean", "training/rollout_probs_diff_max"))
    assert len(scores) == len(apart) == 15
    assert scores[0] < 0.2 and scores[-1] > 0.8  # of the answers' words, the share that are digits
    assert max(apart) < 1e-5  # probabilities of the rollout and of the actor


@with_verl
def test_main_ppo_with_a_rollout_of_its_own(tmp_path: Path) -> None:
    """`separate_async`: weights go to another process through the checkpoint engine "fnmodels"."""
    toy = support("verl_toy")
    support("verl_flow").write_model("llama", tmp_path / "model")
    toy.write_task(tmp_path, tmp_path / "model")
    text = toy.printed(toy.command(tmp_path, tmp_path / "model", steps=3) + toy.separate(), tmp_path)
    assert len(toy.logged(text, "critic/score/mean")) == 3


@with_verl
def test_twenty_steps_of_the_sft_trainer_are_those_of_verls_engine(run: Any, tmp_path: Path) -> None:
    """And a run that verl's handler of checkpoints resumes at step 10 goes on bit for bit."""
    toy = support("verl_toy")
    support("verl_flow").write_model("llama", tmp_path / "model")
    toy.write_task(tmp_path, tmp_path / "model")

    def losses(name: str, mesh: str = "", **more: Any) -> tuple[list[float], list[float]]:
        arguments = toy.sft(tmp_path, tmp_path / "model", name, mesh=mesh, steps=20, **more)
        device = "cuda" if name.startswith("fsdp") else "cpu"
        printed = run.program(arguments, 2 if mesh else 1, device)
        return toy.logged(printed, "train/loss"), toy.logged(printed, "train/grad_norm")

    theirs, ours = losses("fsdp"), losses("fnmodels", "tp=2")
    assert [len(one) for one in (*theirs, *ours)] == [20] * 4
    assert theirs[0][-1] < theirs[0][0] - 1
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=5e-6, rel=1e-6)
    again = losses("again", "tp=2", resume=tmp_path / "fnmodels/global_step_10")
    assert [one[10:] for one in ours] == [*again]


@with_verl
def test_the_tinker_worker_of_verl_under_ray(run: Any) -> None:
    """Two actors; a rate and betas that come with one update."""
    (single,) = run("llama", strategy="fnmodels", mesh="")
    found = json.loads(run.program([ROOT / "tests/support/verl_ray.py", run.folder / "llama"], 1).splitlines()[-1])
    for one, other in zip(found["log_probs"], single["log_probs"], strict=True):
        assert one[:-1] == pytest.approx(other[:-1].tolist(), abs=5e-6)
    assert found["moved"] == pytest.approx(5e-4, rel=0.05)  # the first update of AdamW moves by its rate


@with_verl
def test_the_benchmark_runs() -> None:
    environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "train.integrations.verl"}
    command = [sys.executable, str(ROOT / "benchmarks/dev/engine.py"), "--quick", "--threads", "1"]
    environment |= {"PYTHONPATH": str(ROOT), "MASTER_PORT": "29533"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\ntrain, with entropy\n  fnmodels " in done.stdout
    assert re.search(r"optimizer state: \d+ MiB -> 0 MiB in", done.stdout)
