"""The adapter to verl against verl's own FSDP2 engine, in verl's virtual environment: `make verl`.

Without verl only what needs none of it runs: packed rows, and the sentence that says what is missing.
"""

import asyncio
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "tests/support/verl_flow.py"
HERE = importlib.util.find_spec("verl") is not None
with_verl = pytest.mark.skipif(not HERE, reason="verl has a virtual environment of its own: make verl")
MODELS = ("llama", "qwen3", "qwen3_moe", "lfm2")


@pytest.mark.skipif(HERE, reason="verl is installed")
def test_without_verl_a_sentence_says_how_to_get_it() -> None:
    import train.verl

    with pytest.raises(ModuleNotFoundError, match=r"train\.verl\.EngineConfig needs verl .* `make verl`"):
        _ = train.verl.EngineConfig
    assert not hasattr(train.verl, "no_such_name")


def test_a_microbatch_is_one_packed_row() -> None:
    from train.verl.batches import jagged, packed_row

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


Run = Callable[..., list[dict[str, Any]]]


def support(name: str) -> Any:
    """The module tests/support/NAME.py; verl installs a package `tests` of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/support/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """run(model, processes, **settings): what tests/support/verl_flow.py found on each rank with outputs, cached."""
    folder, known = tmp_path_factory.mktemp("verl"), dict[str, list[dict[str, Any]]]()
    flow = support("verl_flow")

    def run(model: str, processes: int = 1, /, **settings: Any) -> list[dict[str, Any]]:
        key = json.dumps([model, processes, settings], sort_keys=True)
        if key not in known:
            out = folder / f"found{len(known)}"
            device = "cpu" if settings["strategy"] == "fnmodels" else "cuda"  # verl registers its engine for that name
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "train.verl"}
            environment |= {"VERL_ENGINE_DEVICE": device, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
            if not (folder / model).exists():
                flow.write_model(model, folder / model)
            arguments = [sys.executable, str(FLOW), str(folder / model), str(out)]
            started = [
                subprocess.Popen(
                    [*arguments, json.dumps(settings)],
                    env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for rank in range(processes)
            ]
            said = [process.communicate(timeout=300)[0] for process in started]
            assert not any(process.returncode for process in started), said[0][-3000:]
            files = sorted(folder.glob(f"{out.name}.*"))
            known[key] = [torch.load(file, weights_only=False) for file in files]
        return known[key]

    return run


def joined(found: list[dict[str, Any]], name: str) -> list[torch.Tensor]:
    """Per-token outputs of all sequences, without each one's last, of which verl's and ours differ."""
    return [sequence[:-1] for rank in found for sequence in rank[name]]


def check_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *outputs: str) -> None:
    for name in outputs:
        for one, other in zip(joined(ours, name), joined(theirs, name), strict=True):
            torch.testing.assert_close(one, other, atol=5e-6, rtol=0)
    for one, other in zip(ours[0]["steps"], theirs[0]["steps"], strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "grad_norm", "lr"} & one.keys():
            # fp32 rounds a norm of 20 to 2e-6
            assert one[name] == pytest.approx(other[name], abs=5e-6, rel=1e-6), name
    before, after = theirs[0]["before"], theirs[0]["after"]
    names = ours[0]["before"].keys() & before.keys()  # verl sends a tied head too
    assert before.keys() - names <= {"lm_head.weight"} and ours[0]["before"].keys() == names
    moved = max(float((after[name] - before[name]).abs().max()) for name in names)
    assert moved > 1e-3
    for name in names:
        assert torch.equal(ours[0]["before"][name], before[name])
        # AdamW magnifies roundings of gradients that are nearly 0.
        assert float((ours[0]["after"][name] - after[name]).abs().max()) < 1e-3 * moved


@with_verl
@pytest.mark.parametrize("model", MODELS)
def test_one_process_is_verls_own_engine(run: Run, model: str) -> None:
    settings: dict[str, Any] = {"strategy": "fsdp2"}
    if model == "lfm2":  # in packed rows transformers' convolutions read the sequence before
        settings |= {"use_remove_padding": False, "model": {"use_remove_padding": False}}
    check_equal(run(model, strategy="fnmodels"), run(model, **settings), "log_probs", "entropy")


@with_verl
@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", "fsdp=2"), ("llama", "tp=2"), ("qwen3_moe", "ep=2"), ("llama", "cp=2"), ("llama", "pp=2")],
)
def test_every_mesh_is_verls_own_engine(run: Run, model: str, mesh: str) -> None:
    theirs = run(
        model, 2 if mesh in ("fsdp=2", "ep=2") else 1, strategy="fsdp2"
    )  # mini-batches are of each rank's rows
    check_equal(run(model, 2, strategy="fnmodels", mesh=mesh), theirs, "log_probs", "entropy")


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2", "tp=2"])
def test_a_critic_is_verls_own(run: Run, mesh: str) -> None:
    theirs = run("critic", strategy="fsdp2", kind="value_model")
    ours = run("critic", 2 if mesh else 1, strategy="fnmodels", kind="value_model", mesh=mesh)
    check_equal(ours, theirs, "values")


@with_verl
@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_a_resumed_engine_goes_on_bit_for_bit(run: Run, mesh: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "fnmodels", "mesh": mesh}
    processes = 2 if mesh else 1
    through = run("llama", processes, **settings)[0]
    again = run("llama", processes, **settings, resume=through["saved"])[0]
    assert len(again["steps"]) == 5
    for one, other in zip(again["steps"], through["steps"][-5:], strict=True):
        assert all(one[name] == other[name] for name in ("loss", "grad_norm", "lr"))
    assert all(torch.equal(tensor, again["after"][name]) for name, tensor in through["after"].items())


@with_verl
def test_adapters_train_alone_and_the_base_is_the_reference(run: Run) -> None:
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (plain,), (found,) = run("llama", strategy="fnmodels"), run("llama", strategy="fnmodels", model=lora)
    for one, other in zip(plain["log_probs"], found["reference"], strict=True):
        assert torch.equal(one, other)
    moved = {name for name, tensor in found["after"].items() if not torch.equal(tensor, found["before"][name])}
    assert moved and all(name.endswith(("q_proj.weight", "down_proj.weight")) for name in moved)


@with_verl
def test_bf16_has_fp32_master_weights(run: Run) -> None:
    (plain,), (found,) = run("llama", strategy="fnmodels"), run("llama", strategy="fnmodels", dtype="bfloat16")
    losses = [[step["loss"] for step in one["steps"]] for one in (plain, found)]
    for one, other in zip(losses[0][:5], losses[1][:5], strict=True):
        assert other == pytest.approx(one, rel=2e-2) and other != one


@with_verl
def test_a_rollout_answers_as_generate_does(tmp_path: Path) -> None:
    """Requests that come while others run, greedy and drawn; weights that come later; refusals."""
    import params as P
    import train
    from train.verl.rollout import Server

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
        tensors = list(P.export(config, params))
        server.receive(tensors[:3], False, version)
        server.receive(tensors[3:], True, version)
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
    with pytest.raises(NotImplementedError, match="has bad_words=7, which"):
        asyncio.run(answers(server, bad_words=7))
    with pytest.raises(ValueError, match="The prompt has 14 tokens; the rollout has room for 14"):
        asyncio.run(server.generate("long", list(range(14)), plain))
    server.sleep()
    with pytest.raises(RuntimeError, match="has no weights yet"):
        asyncio.run(answers(server))


@with_verl
def test_main_ppo_learns_with_this_engine_and_rollout(tmp_path: Path) -> None:
    toy = support("verl_toy")
    support("verl_flow").write_model("llama", tmp_path / "model")
    toy.write_task(tmp_path, tmp_path / "model")
    environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "train.verl"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = toy.command(tmp_path, tmp_path / "model", steps=8)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def logged(name: str) -> list[float]:
        return [float(value) for value in re.findall(rf"{name}:(?:np\.float\d+\()?([-+.e\d]+)", done.stdout)]

    scores, apart = logged("critic/score/mean"), logged("training/rollout_probs_diff_max")
    assert len(scores) == len(apart) == 8
    assert scores[-1] > scores[0] + 0.1  # of the answers' words, a tenth more are digits
    assert max(apart) < 1e-5  # probabilities of the rollout and of the actor


@with_verl
def test_the_benchmark_runs() -> None:
    environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "train.verl"}
    command = [sys.executable, str(ROOT / "benchmarks/engine.py"), "--quick", "--threads", "1"]
    environment |= {"PYTHONPATH": str(ROOT), "MASTER_PORT": "29533"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\ntrain, with entropy\n  fnmodels " in done.stdout
