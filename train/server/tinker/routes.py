"""The routes that Tinker's package calls."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from train.integrations.tinker import types
from train.integrations.tinker.sampling import SamplingClient
from train.integrations.tinker.training import LoraConfig, TrainingClient

from ..body import Body
from ..errors import ApiError
from ..guard import read_body
from .custom import custom_loss, custom_routes
from .futures import SMALL
from .samplers import sampler_routes
from .samples import HEAD
from .shared import MISTAKES, finish, future, post
from .trainer import Adapters, Trainer
from .wire import place_of, training_output, training_pass

RANK = 1024  # of adapters, at most
POLL = 20.0  # seconds for which a client waits for a result in one request


def tinker_routes(trainer: Trainer) -> list[Route]:
    """The routes over a trainer."""
    return [*_session_routes(trainer), *_model_routes(trainer), *custom_routes(trainer), *sampler_routes(trainer)]


def _session_routes(trainer: Trainer) -> list[Route]:
    service = trainer.service

    async def healthz(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def client_config(request: HttpRequest) -> Response:
        known = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False}
        return JSONResponse(known | {"custom_loss_server_side": True})

    async def dynamic_config(request: HttpRequest) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def telemetry(request: HttpRequest) -> Response:
        await read_body(request, service.limits.body)  # which nobody reads
        return JSONResponse({"status": "accepted"})

    async def capabilities(request: HttpRequest) -> Response:
        known = {"model_name": service.model.name, "max_context_length": service.limits.context}
        return JSONResponse({"supported_models": [known | {"trainable": True, "sampleable": True}]})

    async def create_session(request: HttpRequest) -> Response:
        finish(await service.body(request), "create_session")
        return JSONResponse({"type": "create_session", "session_id": trainer.begin_session()})

    async def heartbeat(request: HttpRequest) -> Response:
        body = await service.body(request)
        session = body.needed("session_id")
        finish(body, "session_heartbeat")
        trainer.keep(session)
        return JSONResponse({"type": "session_heartbeat"})

    async def retrieve(request: HttpRequest) -> Response:
        body = await service.body(request)
        request_id = body.needed("request_id")
        finish(body, "retrieve_future")
        value = await trainer.futures.value(request_id, POLL)
        if isinstance(value, bytes):
            return Response(value, media_type="application/x-protobuf")
        if isinstance(value, Exception):
            return JSONResponse({"error": _words(value), "category": _category(value)})
        return JSONResponse(value)

    return [
        Route("/api/v1/healthz", healthz),
        Route("/api/v1/get_server_capabilities", capabilities),
        post("client/config", client_config),
        post("client/dynamic_config", dynamic_config),
        post("telemetry", telemetry),
        post("create_session", create_session),
        post("session_heartbeat", heartbeat),
        post("retrieve_future", retrieve),
    ]


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, (ApiError, *MISTAKES)) else f"{type(error).__name__}: {error}"


def _category(error: Exception) -> str:
    if isinstance(error, ApiError):
        return "user" if error.status < 500 else "server"
    return "user" if isinstance(error, (*MISTAKES, TypeError)) else "server"


def _model_routes(trainer: Trainer) -> list[Route]:
    service = trainer.service

    async def create_model(request: HttpRequest) -> Response:
        body = await service.body(request)
        _check_adamw(body)
        name = body.needed("base_model")
        trainer.check_base(name)
        lora, place = _lora(body), (body.needed("session_id"), body.needed_integer("model_seq_id"))
        finish(body, "create_model")

        def make(adapters: Adapters) -> dict[str, Any]:
            adapters.training = trainer.new(lora)
            return {"type": "create_model", "model_id": model_id}

        request_id, model_id = trainer.make(*place, name, make)
        return future(request_id, model_id=model_id)

    async def get_info(request: HttpRequest) -> Response:
        model_id = await _model_id(request, "get_info")
        adapters, name = trainer.model(model_id), service.model.name
        data = {"arch": trainer.base.config.model_type, "model_name": adapters.base_model}
        data["tokenizer_id"] = str(trainer.base.folder)
        info = {"type": "get_info", "model_id": model_id, "model_name": name, "is_lora": True, "model_data": data}
        return JSONResponse(info | {"lora_rank": adapters.ready().lora.rank})

    async def forward_backward(request: HttpRequest) -> Response:
        message = await read_body(request, service.limits.body)
        with trainer.turn(*place_of(message)):
            asked = await service.in_thread(training_pass, message)
            session = trainer.model(asked.model_id).session  # before pictures are read
            custom, replayed = custom_loss(trainer, asked), 0
            data = await service.in_thread(trainer.read_data, asked.data)
            if trainer.routed:
                data, replayed = await service.in_thread(trainer.sequences.replayed, data, asked.spans, session)

            def run(training: TrainingClient) -> bytes:
                if custom is not None:
                    return training_output(training.forward_backward_custom(data, custom).result(), replayed)
                compute = training.forward if asked.forward_only else training.forward_backward
                return training_output(compute(data, asked.loss_fn, asked.config or None).result(), replayed)

            place = asked.model_id, asked.seq_id
            return future(trainer.order(*place, run, size=_most_bytes(data)), model_id=asked.model_id)

    async def optim_step(request: HttpRequest) -> Response:
        body = await service.body(request)
        with trainer.turn(body.peek("model_id"), body.peek("seq_id")):
            if "optimizer_params" in body:
                raise ApiError(400, "optimizer_params are of another optimizer; adam_params are supported.")
            given = body.object("adam_params") or Body({}, "adam_params.")
            names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
            adam = types.AdamParams(**{name: given.number(name) for name in names if name in given})
            given.finish()

            def update(training: TrainingClient) -> dict[str, Any]:
                return {"metrics": training.optim_step(adam).result().metrics}

            return _ordered(body, "optim_step", update)

    def _ordered(
        body: Body, kind: str, job: Callable[[TrainingClient], Any], done: Callable[[Any], Any] = lambda result: result
    ) -> Response:
        model_id, seq_id = body.needed("model_id"), body.needed_integer("seq_id")
        finish(body, kind)
        return future(trainer.order(model_id, seq_id, job, done), model_id=model_id)

    async def _model_id(request: HttpRequest, kind: str) -> str:
        body = await service.body(request)
        model_id = body.needed("model_id")
        finish(body, kind)
        return model_id

    async def save_weights(request: HttpRequest) -> Response:
        body = await service.body(request)
        with trainer.turn(body.peek("model_id"), body.peek("seq_id")):
            name, overwrite = body.text("path"), body.flag("overwrite")

            def save(training: TrainingClient) -> dict[str, Any]:
                chosen = name or f"step-{int(training.engine.state.step)}"
                if not overwrite and trainer.is_saved(training, chosen):
                    raise ValueError(f"{chosen!r} was saved before: choose another name, or overwrite it.")
                saved = training.save_state(chosen).result()
                return {"type": "save_weights", "path": trainer.path(training, saved.path)}

            return _ordered(body, "save_weights", save)

    async def load_weights(request: HttpRequest) -> Response:
        body = await service.body(request)
        with trainer.turn(body.peek("model_id"), body.peek("seq_id")):
            path, optimizer = body.needed("path"), body.flag("optimizer")
            loaded = {"type": "load_weights", "path": path}
            _check_adamw(body)
            if "model_id" in body:

                def load(training: TrainingClient) -> dict[str, Any]:
                    place = trainer.place(path, "weights")
                    (training.load_state_with_optimizer if optimizer else training.load_state)(place)
                    return loaded

                return _ordered(body, "load_weights", load)
            place = body.needed("session_id"), body.needed_integer("model_seq_id")
            base = body.text("base_model", service.model.name)
            trainer.check_base(base)
            finish(body, "load_weights")

            def make(adapters: Adapters) -> dict[str, Any]:
                adapters.training = trainer.saved(path, optimizer=optimizer)
                return loaded | {"model_id": model_id}

            request_id, model_id = trainer.make(*place, base, make)
            return future(request_id, model_id=model_id)

    async def save_for_sampler(request: HttpRequest) -> Response:
        body = await service.body(request)
        with trainer.turn(body.peek("model_id"), body.peek("seq_id")):
            kind, name = "save_weights_for_sampler", body.text("path")
            model_id = body.needed("model_id")
            session = trainer.model(model_id).session
            if body.text("kind", "snapshot") != "snapshot":
                raise body.wrong("kind", '"snapshot": samplers keep the weights of their moment')
            number = body.integer("sampling_session_seq_id") if name else body.needed_integer("sampling_session_seq_id")

            def save(training: TrainingClient) -> str:
                return trainer.path(training, training.save_weights_for_sampler(name or "").result().path)

            def saved(path: str) -> dict[str, Any]:
                return {"type": kind, "path": path}

            def named(sampling: SamplingClient) -> dict[str, Any]:
                sampler_id = f"{session}:sample:{number}"
                trainer.add_sampler(sampler_id, model_id, sampling)
                return {"type": kind, "sampling_session_id": sampler_id}

            if name:
                return _ordered(body, kind, save, saved)
            return _ordered(body, kind, TrainingClient.save_weights_and_get_sampling_client, named)

    async def unload(request: HttpRequest) -> Response:
        model_id = await _model_id(request, "unload_model")
        trainer.unload(model_id)
        return JSONResponse({"type": "unload_model", "model_id": model_id})

    async def weights_info(request: HttpRequest) -> Response:
        body = await service.body(request)
        path = body.needed("tinker_path")
        finish(body, "weights_info")
        try:
            lora = trainer.progress(path)["lora"]
        except (ValueError, FileNotFoundError) as error:
            raise ApiError(404, str(error)) from error
        kinds = {kind: lora[kind] for kind in ("train_mlp", "train_attn", "train_unembed")}
        known = {"base_model": service.model.name, "is_lora": True, "lora_rank": lora["rank"]}
        return JSONResponse(known | kinds)

    return [
        post("create_model", create_model),
        post("get_info", get_info),
        post("forward_backward", forward_backward),
        post("optim_step", optim_step),
        post("save_weights", save_weights),
        post("load_weights", load_weights),
        post("save_weights_for_sampler", save_for_sampler),
        post("unload_model", unload),
        post("weights_info", weights_info),
    ]


def _most_bytes(data: Sequence[types.Datum]) -> int:
    """Bytes of a pass's result at most: a log-probability for each target, and what is beside them."""
    targets = [datum.loss_fn_inputs["target_tokens"] for datum in data if "target_tokens" in datum.loss_fn_inputs]
    return SMALL + sum(HEAD + 4 * one.to_torch().numel() for one in targets)


def _check_adamw(body: Body) -> None:
    given = body.object("optimizer_config")
    if given is None:
        return
    if given.text("type", "adamw") != "adamw":
        raise given.wrong("type", "adamw")
    given.finish()


def _lora(body: Body) -> LoraConfig:
    given = body.object("lora_config")
    if given is None:
        raise ApiError(400, "lora_config is missing: models are adapters over the base model.", param="lora_config")
    lora = LoraConfig(given.integer("rank", 32, low=1, high=RANK), given.integer("seed"))
    kinds = {kind: given.flag(kind, True) for kind in ("train_mlp", "train_attn", "train_unembed")}
    given.finish()
    return replace(lora, **kinds)
