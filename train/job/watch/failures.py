"""Exceptions in code that the command line names: one sentence in place of a traceback, which the run folder keeps."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fnmodels.errors import CheckpointError, UserError, is_out_of_memory
from fnmodels.files import write_text
from params.imported import source_file
from train.checkpoint import saved_steps
from train.comm.failures import peer_failure
from train.data.sources import is_url, streamed
from train.imported import FunctionFailed, Imported
from train.job import run_folder
from train.job.processes.controller import CommandFailed
from train.job.settings import RunSettings, imports


@contextmanager
def naming_code(settings: RunSettings, when: str = "") -> Iterator[None]:
    """Turns an exception that code of the command line raises in the body into FunctionFailed.

    Args:
        settings: Of the run, which name the code: functions, --data and --family.
        when: Where the run is, as "at step 3".
    """
    try:
        yield
    except CommandFailed as failed:  # of a mesh, whose other processes do not answer
        raise CommandFailed(_named(failed.error, settings, when)) from failed.error
    except Exception as error:
        if (named := _named(error, settings, when)) is error:
            raise
        raise named from error


@contextmanager
def keeping_traceback(run: Path, settings: RunSettings) -> Iterator[None]:
    """Turns a failure of the command line's code in the body into a UserError that says where its traceback is kept.

    Args:
        run: The run folder, in which it becomes `run_folder.FAILURE`.
        settings: Of the run.
    """
    try:
        with naming_code(settings):
            yield
    except CommandFailed as failed:
        if not isinstance(failed.error, FunctionFailed):
            raise
        raise CommandFailed(kept(run, failed.error)) from failed.error
    except FunctionFailed as failed:
        raise kept(run, failed) from failed


def _named(error: BaseException, settings: RunSettings, when: str) -> BaseException:
    """The failure of the code in which `error` was raised; `error` itself where it is none of the command line's."""
    if isinstance(error, FunctionFailed):
        return error if error.when or not when else FunctionFailed.of(error.code, error.error, when, error.place)
    if isinstance(error, UserError | CheckpointError) or not isinstance(error, Exception):
        return error
    if is_out_of_memory(error) or peer_failure(error):
        return error
    known = _files(settings)
    cause: BaseException | None = error
    while cause is not None:
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
        inside = [(file, line) for file, line in places if file in known]
        if inside:
            file, line = inside[-1]
            return FunctionFailed.of(known[file], error, when, f"{Path(file).name}, line {line}")
        cause = cause.__cause__ or cause.__context__
    return error


def _files(settings: RunSettings) -> dict[str, str]:
    """{source file: the flag that names code of it}. A function's own file comes before a module that imports it."""
    functions = [*imports(settings).values()]
    functions += [Imported(item, "--data") for item in streamed(settings.data) if not is_url(item)]
    family = getattr(settings, "family", None)
    found = {} if family is None else {source_file(family): f"--family {family}"}
    for imported in functions:
        code = f"{imported.flag} {imported.path}"
        found |= {file: code for file in imported.source_files if file is not None}
    return {file: code for file, code in found.items() if file is not None}


def kept(run: Path, failed: FunctionFailed) -> UserError:
    """The failure as a sentence, whose traceback is written into the run folder."""
    write_text(run / run_folder.FAILURE, "".join(traceback.format_exception(failed.error)))
    saved = saved_steps.steps(run / run_folder.STEPS)
    after = f"--resume goes on from the save of step {saved[-1]}" if saved else "nothing is saved yet"
    return UserError(f"{failed} (traceback: {run / run_folder.FAILURE}); {after}")
