"""The routes of Tinker's protocol for samplers: sessions, answers, and their end."""

import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import ApiError
from ..worker import Ticket
from .samples import SAMPLES, Sample
from .shared import finish, future, post
from .trainer import Trainer


def sampler_routes(trainer: Trainer) -> list[Route]:
    """The routes over a trainer's samplers."""
    service = trainer.service
    under_way: dict[str, list[Ticket]] = {}

    async def create_sampling_session(request: HttpRequest) -> Response:
        body = await service.body(request)
        session, number = body.needed("session_id"), body.needed_integer("sampling_session_seq_id")
        path = body.text("model_path")
        base = body.needed("base_model") if path is None else body.text("base_model", service.model.name)
        finish(body, "create_sampling_session")
        trainer.keep(session)
        trainer.check_base(base)
        sampler_id = f"{session}:sample:{number}"
        if path is None:
            trainer.samplers.add_base(sampler_id, service.model.served)
        else:
            await trainer.samplers.add_named(sampler_id, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def sampler(request: HttpRequest) -> Response:
        sampler_id = request.path_params["name"]
        trainer.samplers.check(sampler_id)
        return JSONResponse({"sampler_id": sampler_id, "base_model": service.model.name})

    async def asample(request: HttpRequest) -> Response:
        body = await service.body(request)
        sampler_id = body.text("sampling_session_id")
        if sampler_id is None:
            trainer.check_base(body.needed("base_model"))
            request_id = uuid.uuid4().hex
        else:
            trainer.keep(sampler_id.partition(":")[0])
            request_id = f"{sampler_id}:{body.needed_integer('seq_id')}"

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
            model = service.model.served if sampler_id is None else await trainer.samplers.find(sampler_id)
            limits = (service.model.ends, service.limits.context)
            sample = await service.in_thread(Sample, body, n, trainer.base, *limits, done, trainer.routed)
            await service.in_thread(service.worker.check, model, sample.requests[0])
        if request_id not in trainer.futures:  # still: the same request may have come meanwhile
            trainer.futures.begin(request_id, sample.most())
            try:
                service.worker.submit(model, sample.tickets)
            except ApiError:
                trainer.futures.forget(request_id)
                raise
            under_way[request_id] = sample.tickets
        return future(request_id, sample_sequence_ids=[f"{request_id}:{i}" for i in range(n)])

    async def cancel(request: HttpRequest) -> Response:
        body = await service.body(request)
        request_id = body.needed("request_id")
        finish(body, "cancel_future")
        service.worker.cancel(under_way.pop(request_id, []))
        trainer.futures.end(request_id, ApiError(400, "The request was cancelled by its client."))
        return Response(status_code=204)

    async def join(request: HttpRequest) -> Response:
        body = await service.body(request)
        sampler_id = body.needed("sampling_session_id")
        finish(body, "join_sampling_session")
        trainer.samplers.check(sampler_id)
        return JSONResponse({"type": "join_sampling_session", "client_counter": next(clones)})

    clones = iter(range(1, 1_000_000_000))
    return [
        post("create_sampling_session", create_sampling_session),
        post("join_sampling_session", join),
        Route("/api/v1/samplers/{name:path}", sampler),
        post("asample", asample),
        post("cancel_future", cancel),
    ]
