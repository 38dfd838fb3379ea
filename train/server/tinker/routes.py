"""The routes that Tinker's package calls."""

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import params as P
from fnmodels.errors import UserError
from train.engine import NoGradientsError
from train.integrations.tinker import types
from train.integrations.tinker.sampling import SamplingClient
from train.integrations.tinker.training import LoraConfig, TrainingClient

from ..body import Body
from ..errors import ApiError
from ..guard import read_body
from ..worker import Ticket
from .custom import custom_loss, custom_routes
from .samples import SAMPLES, Sample
from .trainer import Adapters, Trainer
from .wire import training_output, training_pass

# Fields that Tinker's package sends and that have no meaning here: notes about the client and its checkpoints are not
# kept, saves never expire, there are no accounts, and results are never shortened.
_NO_MEANING = """
    tags user_metadata sdk_version project_id display_name ttl_seconds weights_access_token allow_metadata_only
"""
NO_MEANING = frozenset(_NO_MEANING.split())
MISTAKES = (UserError, ValueError, FileNotFoundError, NoGradientsError)  # of clients, with a sentence as message
RANK = 1024  # of adapters, at most
POLL = 20.0  # seconds for which a client waits for a result in one request
Answer = Callable[[HttpRequest], Awaitable[Response]]


def tinker_routes(trainer: Trainer) -> list[Route]:
    """The routes over a trainer."""
    return [*_session_routes(trainer), *_model_routes(trainer), *custom_routes(trainer), *_sampler_routes(trainer)]


def _post(path: str, answer: Answer) -> Route:
    return Route(f"/api/v1/{path}", answer, methods=["POST"])


def _finish(body: Body, kind: str, *more: tuple[str, Any]) -> None:
    """ApiError for a field that was not read. kind: the name of the request, which its field `type` repeats."""
    body.finish((("type", kind), *more), NO_MEANING)


def _future(request_id: str, **more: Any) -> Response:
    return JSONResponse({"request_id": request_id, **more})


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
        _finish(await service.body(request), "create_session")
        return JSONResponse({"type": "create_session", "session_id": trainer.begin_session()})

    async def heartbeat(request: HttpRequest) -> Response:
        body = await service.body(request)
        session = body.needed("session_id")
        _finish(body, "session_heartbeat")
        trainer.keep(session)
        return JSONResponse({"type": "session_heartbeat"})

    async def retrieve(request: HttpRequest) -> Response:
        body = await service.body(request)
        request_id = body.needed("request_id")
        _finish(body, "retrieve_future")
        value = await trainer.futures.value(request_id, POLL)
        if isinstance(value, bytes):
            return Response(value, media_type="application/x-protobuf")
        if isinstance(value, Exception):
            return JSONResponse({"error": _words(value), "category": _category(value)})
        return JSONResponse(value)

    return [
        Route("/api/v1/healthz", healthz),
        Route("/api/v1/get_server_capabilities", capabilities),
        _post("client/config", client_config),
        _post("client/dynamic_config", dynamic_config),
        _post("telemetry", telemetry),
        _post("create_session", create_session),
        _post("session_heartbeat", heartbeat),
        _post("retrieve_future", retrieve),
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
        _finish(body, "create_model")

        def make(adapters: Adapters) -> dict[str, Any]:
            adapters.training = trainer.new(lora)
            return {"type": "create_model", "model_id": model_id}

        request_id, model_id = trainer.make(*place, name, make)
        return _future(request_id, model_id=model_id)

    async def get_info(request: HttpRequest) -> Response:
        model_id = await _model_id(request, "get_info")
        adapters, name = trainer.model(model_id), service.model.name
        data = {"arch": trainer.base.config.model_type, "model_name": adapters.base_model}
        data["tokenizer_id"] = str(trainer.base.folder)
        info = {"type": "get_info", "model_id": model_id, "model_name": name, "is_lora": True, "model_data": data}
        return JSONResponse(info | {"lora_rank": adapters.ready().lora.rank})

    async def forward_backward(request: HttpRequest) -> Response:
        message = await read_body(request, service.limits.body)
        try:
            asked = await service.in_thread(training_pass, message)
            await service.in_thread(trainer.check_data, asked.data)
            custom, data, replayed = custom_loss(trainer, asked), asked.data, 0
            if trainer.routed:
                session = trainer.model(asked.model_id).session
                data, replayed = await service.in_thread(trainer.sequences.replayed, data, asked.spans, session)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

        def run(training: TrainingClient) -> bytes:
            if custom is not None:
                return training_output(training.forward_backward_custom(data, custom).result(), replayed)
            compute = training.forward if asked.forward_only else training.forward_backward
            return training_output(compute(data, asked.loss_fn, asked.config or None).result(), replayed)

        return _future(trainer.order(asked.model_id, asked.seq_id, run), model_id=asked.model_id)

    async def optim_step(request: HttpRequest) -> Response:
        body = await service.body(request)
        if "optimizer_params" in body:
            raise ApiError(400, "optimizer_params are of another optimizer; adam_params are supported.")
        given = body.object("adam_params") or Body({}, "adam_params.")
        names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
        adam = types.AdamParams(**{name: given.number(name) for name in names if name in given})
        given.finish()
        return _ordered(body, "optim_step", lambda training: {"metrics": training.optim_step(adam).result().metrics})

    def _ordered(
        body: Body, kind: str, job: Callable[[TrainingClient], Any], done: Callable[[Any], Any] = lambda result: result
    ) -> Response:
        model_id, seq_id = body.needed("model_id"), body.needed_integer("seq_id")
        _finish(body, kind)
        return _future(trainer.order(model_id, seq_id, job, done), model_id=model_id)

    async def _model_id(request: HttpRequest, kind: str) -> str:
        body = await service.body(request)
        model_id = body.needed("model_id")
        _finish(body, kind)
        return model_id

    async def save_weights(request: HttpRequest) -> Response:
        body = await service.body(request)
        name, overwrite = body.text("path"), body.flag("overwrite")

        def save(training: TrainingClient) -> dict[str, Any]:
            chosen = name or f"step-{int(training.engine.state.step)}"
            if not overwrite and trainer.is_saved(training, chosen):
                raise ValueError(f"{chosen!r} was saved before: choose another name, or overwrite it.")
            return {"type": "save_weights", "path": trainer.path(training, training.save_state(chosen).result().path)}

        return _ordered(body, "save_weights", save)

    async def load_weights(request: HttpRequest) -> Response:
        body = await service.body(request)
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
        _finish(body, "load_weights")

        def make(adapters: Adapters) -> dict[str, Any]:
            adapters.training = trainer.saved(path, optimizer=optimizer)
            return loaded | {"model_id": model_id}

        request_id, model_id = trainer.make(*place, base, make)
        return _future(request_id, model_id=model_id)

    async def save_for_sampler(request: HttpRequest) -> Response:
        body = await service.body(request)
        kind, name = "save_weights_for_sampler", body.text("path")
        session = trainer.model(body.needed("model_id")).session
        if body.text("kind", "snapshot") != "snapshot":
            raise body.wrong("kind", '"snapshot": samplers keep the weights of their moment')
        number = body.integer("sampling_session_seq_id") if name else body.needed_integer("sampling_session_seq_id")

        def save(training: TrainingClient) -> str:
            return trainer.path(training, training.save_weights_for_sampler(name or "").result().path)

        def saved(path: str) -> dict[str, Any]:
            return {"type": kind, "path": path}

        def named(sampling: SamplingClient) -> dict[str, Any]:
            sampler_id = f"{session}:sample:{number}"
            trainer.add_sampler(sampler_id, sampling)
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
        _finish(body, "weights_info")
        try:
            lora = trainer.progress(path)["lora"]
        except (ValueError, FileNotFoundError) as error:
            raise ApiError(404, str(error)) from error
        kinds = {kind: lora[kind] for kind in ("train_mlp", "train_attn", "train_unembed")}
        known = {"base_model": service.model.name, "is_lora": True, "lora_rank": lora["rank"]}
        return JSONResponse(known | kinds)

    return [
        _post("create_model", create_model),
        _post("get_info", get_info),
        _post("forward_backward", forward_backward),
        _post("optim_step", optim_step),
        _post("save_weights", save_weights),
        _post("load_weights", load_weights),
        _post("save_weights_for_sampler", save_for_sampler),
        _post("unload_model", unload),
        _post("weights_info", weights_info),
    ]


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


def _sampler_routes(trainer: Trainer) -> list[Route]:
    service = trainer.service
    under_way: dict[str, list[Ticket]] = {}

    async def create_sampling_session(request: HttpRequest) -> Response:
        body = await service.body(request)
        session, number = body.needed("session_id"), body.needed_integer("sampling_session_seq_id")
        path = body.text("model_path")
        base = body.needed("base_model") if path is None else body.text("base_model", service.model.name)
        _finish(body, "create_sampling_session")
        trainer.keep(session)
        trainer.check_base(base)
        sampler_id = f"{session}:sample:{number}"
        if path is None:
            trainer.samplers[sampler_id] = service.model.served
        else:

            def load() -> SamplingClient:
                place = trainer.place(path, "sampler_weights")
                return SamplingClient(
                    trainer.base, P.lora.load_adapters(place, trainer.base.config, trainer.base.params)
                )

            try:
                trainer.add_sampler(sampler_id, await service.in_thread(load))
            except (ValueError, UserError) as error:
                raise ApiError(404, str(error)) from error
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def sampler(request: HttpRequest) -> Response:
        sampler_id = request.path_params["name"]
        _sampler(sampler_id)
        return JSONResponse({"sampler_id": sampler_id, "base_model": service.model.name})

    def _sampler(sampler_id: str) -> Any:
        if sampler_id not in trainer.samplers:
            raise ApiError(404, f"There is no sampler {sampler_id!r}: it was forgotten, or the server started anew.")
        return trainer.samplers[sampler_id]

    async def asample(request: HttpRequest) -> Response:
        body = await service.body(request)
        sampler_id = body.text("sampling_session_id")
        if sampler_id is None:
            trainer.check_base(body.needed("base_model"))
            model, request_id = service.model.served, uuid.uuid4().hex
        else:
            model, request_id = _sampler(sampler_id), f"{sampler_id}:{body.needed_integer('seq_id')}"

        def done(value: Any) -> None:
            tickets = under_way.pop(request_id, [])
            if isinstance(value, Exception):  # of one of the answers: the others are of no use
                service.worker.cancel(tickets)
            elif sampler_id is not None:
                for number, recorded in enumerate(sample.recorded()):
                    trainer.sequences.keep(f"{request_id}:{number}", recorded)
            trainer.futures.end(request_id, value)

        n = body.integer("num_samples", 1, low=1, high=SAMPLES)
        if request_id not in trainer.futures:
            service.worker.check_room(n)  # before anything is made
            limits = (service.model.ends, service.limits.context)
            sample = await service.in_thread(Sample, body, n, *limits, done, trainer.routed)
            await service.in_thread(service.worker.check, model, sample.requests[0])
        if request_id not in trainer.futures:  # still: the same request may have come meanwhile
            trainer.futures.begin(request_id)
            try:
                service.worker.submit(model, sample.tickets)
            except ApiError:
                trainer.futures.forget(request_id)
                raise
            under_way[request_id] = sample.tickets
        return _future(request_id, sample_sequence_ids=[f"{request_id}:{i}" for i in range(n)])

    async def cancel(request: HttpRequest) -> Response:
        body = await service.body(request)
        request_id = body.needed("request_id")
        _finish(body, "cancel_future")
        service.worker.cancel(under_way.pop(request_id, []))
        trainer.futures.end(request_id, ApiError(400, "The request was cancelled by its client."))
        return Response(status_code=204)

    async def join(request: HttpRequest) -> Response:
        body = await service.body(request)
        sampler_id = body.needed("sampling_session_id")
        _finish(body, "join_sampling_session")
        _sampler(sampler_id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": next(clones)})

    clones = iter(range(1, 1_000_000_000))
    return [
        _post("create_sampling_session", create_sampling_session),
        _post("join_sampling_session", join),
        Route("/api/v1/samplers/{name:path}", sampler),
        _post("asample", asample),
        _post("cancel_future", cancel),
    ]
