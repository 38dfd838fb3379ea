"""Each place that opens, writes or replaces a file is in the tables of this folder, and goes by `fnmodels.files`.

A new one fails here until it is added, with the case of `readers.py`, `writers.py` or `test_links.py` that damages it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .readers import READERS
from .test_links import MORE
from .writers import WRITERS

ROOT = Path(__file__).parents[2]
PACKAGES = ("fnmodels", "params", "train")
# what opens a file by its name without `fnmodels.files`: functions, methods, and functions of other modules
RAW_NAME = re.compile(
    "open|load_file|save_file|safe_open|FileIO|copyfile|copytree|copy2|SummaryWriter|NamedTemporaryFile|mkstemp"
)
RAW_METHOD = re.compile(
    "fdopen|read_text|read_bytes|write_text|write_bytes|memmap|fromfile|tofile|from_file|savefig|touch|ParquetFile|savez|"
    "genfromtxt|loadtxt|savetxt|read_table|imread|imsave|symlink_to|hardlink_to|from_pretrained"
)
RAW_OF_MODULE = re.compile(
    r"(np|torch|json|pickle|tomllib|yaml)\.(load|save|dump)|shutil\.(copy|move)|os\.(rename|replace|link)|zipfile\.ZipFile"
    r"|mmap\.mmap|sqlite3\.connect"
)
# the functions of `fnmodels.files`, and what is built on them
OPENER = re.compile(
    "open_regular|read_bytes|read_text|open_append|write_atomic|write_text|write_new|copy_file|replace_file|"
    "move_into_place|plain_file|inner_file|read_json|open_tensors|open_tensor_files|write_tensors|saving|staging_folder|"
    "reserved_staging_path|cached|read_manifest"
)
RAW = {  # {place: why it needs no opener}
    "fnmodels.cache.saved._loaded": "bytes of `read_bytes`",
    "fnmodels.cache.saved._surroundings": "the source of this package",
    "fnmodels.models.common.registry._names": "the source of a family",
    "fnmodels.ops.cpu.machine.machine": "/proc/cpuinfo",
    "fnmodels.ops.cpu.product_table._alone_in": "the cache folder, to lock it",
    "fnmodels.research.sae.harvest": "a new file that the caller names",
    "params.checkpoint.manifest.write_manifest": "a new file of the staging folder",
    "params.checkpoint.manifest.digest": "a descriptor of `open_regular`",
    "params.io.safetensors_file.OpenFiles.get": "a descriptor of `open_regular`",
    "params.io.safetensors_file.map_file": "/dev/fd of a descriptor of `open_regular`",
    "params.io.safetensors_file.write_tensors": "a new file, of mode x, in a folder that is not published yet",
    "params.new_family._write": "the source of this package, by its developers",
    "params.new_family.skeletons": "the source of this package, by its developers",
    "params.compare.reference.load_reference": "transformers' reader, of a folder that this one has read",
    "train.checkpoint.saved_steps.commit": "renames a folder that it made",
    "train.checkpoint.saved_steps._prune": "renames a step, which may be a link",
    "train.checkpoint.saved_steps.set_aside": "renames a step, which may be a link",
    "train.commands.sample.sample": "a file that the caller names, to write answers into",
    "train.commands.tasks.evaluate": "a file that the caller names, to write results into",
    "train.data.chat_process._Renderer._forked": "/dev/null",
    "train.data.chat_renderer._addresses": "/proc/self/statm",
    "train.data.pictures._decoded": "bytes of `read_bytes`",
    "train.data.records._json_lines": "a descriptor of `open_regular`",
    "train.data.records._parquet": "a descriptor of `open_regular`",
    "train.data.records.read_parquet": "an open file",
    "train.data.stream.files.StreamFile.open": "a descriptor of `open_regular`, or a file of fsspec",
    "train.data.stream.readers.read_from": "a descriptor of `open_regular`, or a file of fsspec",
    "train.server.model._picture": "bytes of a request",
    "train.integrations.tinker.images._tokens_and_images": "bytes of a chunk, or of `read_bytes`",
    "train.data.token_shards._mapped": "a descriptor of `open_regular`",
    "train.data.token_shards._cached_lengths.write": "a new file, by `cached`",
    "train.data.token_shards._cached_lengths.read": "a file of the private cache, which `cached` checked",
    "train.data.tokenized._cached.write": "a new file, by `cached`",
    "train.data.tokenized._cached.read": "a file of the private cache, which `cached` checked",
    "train.eval.command.evaluate": "a file that the caller names, to write scores into",
    "train.job.tasks.initial_model.new_tokenizer": "a new file, by `cached`",
    "train.job.pictures.save_losses": "a new file, by `write_atomic`",
    "train.job.profile.profiled.write": "a new file, by `write_atomic`",
    "train.job.processes.threads._quotas": "files of the kernel",
    "train.job.processes.threads._words": "files of the kernel",
    "train.job.run_folder.acquire": "a descriptor of `open_regular`",
    "train.job.trackers.TensorBoard.__init__": "new files of a folder that `locked` checked",
    "train.simulate.report.picture": "a new file, by `write_atomic`",
}
# {place that uses an opener: the cases of the tables that damage what is read or written there}
USES: dict[str, tuple[str, ...]] = {
    "fnmodels.cache.saved._loaded": ("compiled steps",),
    "fnmodels.cache.saved._compiled": ("compiled steps",),
    "fnmodels.ops.cpu.product_table.read": ("rates of products",),
    "fnmodels.ops.cpu.product_table.write": ("rates of products",),
    "params.checkpoint.config.read_config": ("a model",),
    "params.checkpoint.embedder_tokenizer._fields": ("an embedder",),
    "params.checkpoint.embedder._modules": ("an embedder",),
    "params.checkpoint.embedder._fields": ("an embedder",),
    "params.checkpoint.embedder._dense": ("an embedder",),
    "params.checkpoint.embedder._write": ("an embedder",),
    "params.checkpoint.embedder.write_modules": ("an embedder", "an embedder of other layers"),
    "params.checkpoint.manifest.write_manifest": ("a model", "adapters", "an embedder", "a step"),
    "params.checkpoint.manifest.digest": ("its manifest",),
    "params.checkpoint.manifest.read_manifest": ("its manifest", "manifest of adapters"),
    "params.checkpoint.manifest.verify": (
        "its manifest",
        "manifest of adapters",
        "the manifest of a checkpoint that a run starts from",
    ),
    "params.checkpoint.save.write_model": (
        "a model",
        "a model in shards",
        "a model of another config",
        "a model that becomes shards",
        "shards that become a model",
    ),
    "params.checkpoint.shard_index.open_folder": ("a model", "a model in shards"),
    "params.checkpoint.shard_index._weight_map": ("a model in shards",),
    "params.checkpoint.transaction.saving": ("a model", "adapters", "an embedder"),
    "params.checkpoint.transaction._fault": ("a save that was cut short",),
    "params.checkpoint.transaction._replace": ("a save that was cut short",),
    "params.checkpoint.transaction._same": ("a model",),
    "params.inspect._adapters": ("adapters to inspect",),
    "params.inspect._checksums": ("a model to inspect",),
    "params.io.files.inner_file": ("captions",),
    "params.io.files.read_json": ("a model",),
    "params.checkpoint.gguf_folder.convert.write": ("a converted GGUF file",),
    "params.io.safetensors_file.OpenFiles.get": ("a model", "a GGUF file"),
    "params.io.safetensors_file.open_tensors": ("adapters", "latents"),
    "params.io.staging.staging_folder": ("a step",),
    "params.io.tokenizer_file.read_tokenizer": ("a tokenizer", "an embedder"),
    "params.io.staging.folder_lock": ("a model", "adapters", "an embedder", "a step"),
    "params.lora.peft_save.save_adapters": ("adapters", "adapters of another rank"),
    "params.lora.peft_load.load_adapters": ("adapters",),
    "params.lora.adapter_config.read_config": ("adapters",),
    "params.quantized.methods.read_quantization": ("a model that another file calls quantized",),
    "train.checkpoint.saved_steps.save": ("a step", "a step that removes older ones"),
    "train.checkpoint.saved_steps.commit": ("a step",),
    "train.checkpoint.saved_steps._opened": ("saved steps",),
    "train.checkpoint.saved_steps.load": ("saved steps",),
    "train.commands.compare.settings_of": ("JSON of a run",),
    "train.commands.compare.effective_settings": ("JSON of a run",),
    "train.commands.prompt_rows.read_prompts": ("prompts",),
    "train.data.cache.cached": ("a cached file",),
    "train.data.chat.read_template": ("a chat template",),
    "train.data.chat._processor_template": ("a processor's template",),
    "train.data.chat._tokenizer_config": ("a chat template",),
    "train.data.corpus.read_text_file": ("texts",),
    "train.data.examples.read_examples": ("examples",),
    "train.data.latents.read_latents": ("latents",),
    "train.data.image_prompts.ImagePrompts.of": ("settings of images",),
    "train.data.pictures.Pixels.of": ("normalization of pictures",),
    "train.data.pictures._decoded": ("a picture", "captions"),
    "train.data.pictures.write_grid": ("a grid of pictures",),
    "train.data.records._json_lines": ("records",),
    "train.data.records._parquet": ("records of a table",),
    "train.data.stream.files.StreamFile.open": ("a stream",),
    "train.data.token_shards.open_shards": ("shards of tokens",),
    "train.data.token_shards._mapped": ("shards of tokens", "a shard of tokens"),
    "train.data.token_shards._cached_lengths": ("shards of tokens", "a cached file"),
    "train.data.tokenized._cached": ("a cached file",),
    "train.eval.pretrained.begin_id": ("a model",),
    "train.eval.pretrained.weights_folder": ("adapters",),
    "train.eval.pretrained._fields": ("defaults of generation",),
    "train.eval.pretrained.copy_companions": ("companions of a model",),
    "train.integrations.tinker.images.InputReader._file": ("a picture",),  # whose bytes the same function decodes
    "train.job.tasks.initial_model.new_tokenizer": ("a cached file",),
    "train.job.metrics_log.read_rows": ("rows of metrics",),
    "train.job.metrics_log.truncate_after": ("rows of metrics",),
    "train.job.metrics_log.MetricsLog.append": ("the logs of a run",),
    "train.job.model_card.write": ("JSON of a run",),
    "train.job.pictures.save_losses": ("a grid of pictures",),
    "train.job.profile.profiled.export": ("a grid of pictures",),
    "train.job.report.skipped": ("JSON of a run",),
    "train.job.mesh_flags.check_before_start": ("JSON of a run",),
    "train.job.run.train_run": ("JSON of a run",),
    "train.job.chosen_settings.settings_before": ("settings of a run",),
    "train.job.watch.failures.kept": ("JSON of a run",),
    "train.job.run_folder.locked": ("the logs of a run",),
    "train.job.run_folder.acquired_by": ("the lock of a run",),
    "train.job.run_folder.acquire": ("the logs of a run",),
    "train.job.run_folder.read_json": ("JSON of a run",),
    "train.job.run_folder.write_json": ("JSON of a run",),
    "train.job.settings.toml.toml_values": ("settings", "a recipe"),
    "train.job.settings.runs.RunSettings": ("settings",),  # a dataclass field's metadata is called saving too
    "train.job.tasks.captions.with_files": ("captions",),
    "train.job.tasks.documents.DocumentTask.write": ("companions of a model",),
    "train.job.tasks.examples.begin": ("JSON of a run",),
    "train.job.tasks.flow.FlowTask.finish": ("JSON of a run",),
    "train.job.tasks.language_model.LanguageModel.write": ("companions of a model",),
    "train.job.tasks.language_model.prepare": ("JSON of a run",),
    "train.job.tasks.language_model.init_run_folder": ("JSON of a run",),
    "train.job.trackers.tracked_by": ("JSON of a run",),
    "train.job.trackers._tracked": ("JSON of a run",),
    "train.job.trackers._remember": ("JSON of a run",),
    "train.job.tasks.text_data.fault_log": ("texts",),
    "train.job.tasks.text_data.fault_log.report": ("the logs of a run",),
    "train.recipe.report._section": ("texts",),
    "train.recipe.report._vocabulary": ("JSON of a run",),
    "train.recipe.run.cook": ("JSON of a run",),
    "train.recipe.run.run_stage": ("JSON of a run",),
    "train.rl.command.learn": ("the logs of a run", "JSON of a run"),
    "train.rl.command.recorded": ("JSON of a run",),
    "train.rl.command.write_checkpoint": ("companions of a model",),
    "train.rl.pictures.Pictures.save": ("companions of a model",),
    "train.rl.pictures.files_of": ("pictures of prompts of rewards",),
    "train.rl.prompts._fingerprint": ("pictures of prompts of rewards",),
    "train.rl.prompts.read_prompts": ("prompts of rewards",),
    "train.simulate.report.picture": ("a grid of pictures",),
}


def calls() -> Iterator[tuple[str, str]]:
    """(module.function, what is called there) of every call in the packages that reads or writes a file."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
            yield from _calls(ast.parse(path.read_text()), module)


def _calls(node: ast.AST, place: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.Call) and (name := _file_call(child.func)):
            yield place, name
        yield from _calls(child, f"{place}.{child.name}" if named else place)


def _file_call(called: ast.expr) -> str | None:
    if isinstance(called, ast.Name) and (RAW_NAME.fullmatch(called.id) or OPENER.fullmatch(called.id)):
        return called.id
    if isinstance(called, ast.Attribute):
        text = ast.unparse(called)
        if RAW_NAME.fullmatch(called.attr) or RAW_METHOD.fullmatch(called.attr) or RAW_OF_MODULE.fullmatch(text):
            return f".{called.attr}"
        if text.startswith(("files.", "run_folder.")) and OPENER.fullmatch(called.attr):
            return called.attr
    return None


def places(*, openers: bool) -> set[str]:
    """Where files are opened by `fnmodels.files`, or without it."""
    return {
        place
        for place, name in calls()
        if bool(OPENER.fullmatch(name)) == openers and not place.startswith("fnmodels.files.")
    }


def test_each_place_that_opens_files_by_itself_is_known_and_says_why() -> None:
    found = places(openers=False)
    assert found - RAW.keys() == set(), "it opens a file without fnmodels.files; or add it to RAW with the reason"
    assert RAW.keys() - found == set(), "it is gone"


def test_each_place_that_reads_or_writes_is_in_a_table_of_damage() -> None:
    found = places(openers=True)
    assert found - USES.keys() == set(), "it needs a case in readers.py, writers.py or test_links.py"
    assert USES.keys() - found == set(), "it is gone"


def test_each_use_names_cases_that_exist_and_each_case_is_used() -> None:
    cases = {case.name for case in (*READERS, *WRITERS, *MORE)}
    assert {name for names in USES.values() for name in names} == cases


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("with open(path) as file: pass", "open"),
        ("x = Path(path).read_text()", ".read_text"),
        ("x = np.load(path)", ".load"),
        ("x = json.load(file)", ".load"),
        ("x = Image.open(path)", ".open"),
        ("x = os.open(path, 0)", ".open"),
        ("x = safetensors.safe_open(path)", ".safe_open"),
        ("x = read_json(path)", "read_json"),
    ],
)
def test_a_new_reader_is_found(source: str, name: str) -> None:
    assert list(_calls(ast.parse(f"class A:\n  def f(path):\n    {source}"), "new")) == [("new.A.f", name)]
