"""The text of --plan: whether the run would start and fits, its numbers, and likely mistakes.

Plain aligned lines of at most 100 columns; keys to paste are one line.
"""

from __future__ import annotations

import textwrap
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlhf.algo.schedules import learning_rate
from rlhf.algo.sizes import BYTES_PER_CHANGE, MOST_CHANGED
from rlhf.check.examination import run_models
from rlhf.check.hours import step_time, time_rows, update_time
from rlhf.check.layouts import AS_SET, Layout, Search, changed_keys, search_until_fit
from rlhf.check.memory import (
    BYTES,
    GIB,
    Part,
    RoleMemory,
    checkpoint_bytes,
    kv_cache,
    memory_of_roles,
    preemption,
    total,
    with_article,
)
from rlhf.check.model_shape import ModelShape, config_at, read_shape
from rlhf.check.resources import count_gpus, count_nodes, quantity, with_gpus_here
from rlhf.check.speed import card_description
from rlhf.check.start_checks import class_problems, learning_rate_warnings, plan_problems
from rlhf.check.verdict import fit_verdict
from rlhf.config.data import ENVIRONMENT, DataConfig, DatasetsConfig, S
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import resolved_yaml
from rlhf.config.model_folder import looks_local
from rlhf.config.printing import heartbeat, say, to_stderr
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import Training
from rlhf.config.supervised import SupervisedConfig
from rlhf.data.model_files import local_model_config
from rlhf.data.read import check_source, config_sources, count_rows, local_path, rows_per_epoch, too_few_prompts

COLUMNS, LABEL = 100, 28
BYTES_PER_TOKEN = 4  # assumed: the bytes of JSON's markup stand for the tokens of the template
# Share of the bfloat16 elements that an update changes: 0.33% at lr 1e-6, 1.3% at 1e-5, measured on SmolLM2-135M. Steps
# of Adam have the size of lr, whatever the gradient.
CHANGED_AT_1E6, CHANGED_EXPONENT = 0.0033, 0.6


class Plan(NamedTuple):
    """The text that --plan prints, and the reasons to refuse the run."""

    text: str
    problems: list[str]


def print_plan(config: TrainingProgramConfig, flags: Namespace) -> bool:
    """Print the plan and the config, if the flags ask for them. ValueError if a planned run would not start or fit."""
    problems: list[str] = []
    prompt = ""
    if flags.plan:
        assert isinstance(config, GRPOConfig | SupervisedConfig)
        refusals, prompt = _problems_and_prompt(config)
        text, problems = make_plan(config, refusals)
        say(text, end="")
    if flags.print_config:
        say("\n" * flags.plan + resolved_yaml(config), end="")
    say(prompt, end="")
    if problems:
        raise ValueError("\n".join(problems))
    return bool(flags.plan or flags.print_config)


def _problems_and_prompt(config: TrainingProgramConfig) -> tuple[list[str], str]:
    """Problems that prevent a start, and the first prompt; with the models' classes this takes seconds of imports."""
    problems, prompt = plan_problems(config), ""
    if not problems:
        with heartbeat(lambda: "the plan tries the first prompt and the models' classes", to_stderr):
            try:
                prompt = first_prompt_text(config) if isinstance(config, GRPOConfig) else ""
            except (ValueError, RuntimeError) as error:
                problems.append(str(error))
            problems = problems or class_problems(config)
    return problems, prompt


def first_prompt_text(config: GRPOConfig) -> str:
    """The first prompt as the model gets it; ValueError or RuntimeError if it cannot be made.

    Returns an empty string if the model or the data is not on this machine.
    """
    first, path = config.data.train[0], local_path(config.data.train[0])
    is_here = first.is_environment or (path is not None and path.exists())
    if local_model_config(config.model.path) is None or not is_here:
        return ""
    from rlhf.data.load import read_first_prompt, show_prompt
    from rlhf.data.model_files import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    prompt = read_first_prompt(config.data, tokenizer, has_environment=config.uses_environment_or_tools)
    if config.uses_environment_or_tools:
        from rlhf.config.cli import run_async
        from rlhf.environments.start import StartedEnvironments

        with StartedEnvironments(config, tokenizer) as environments:
            prompt = run_async(environments.first_prompt(prompt))
    return f"\nFirst prompt\n{show_prompt(prompt, tokenizer)}\n"


def make_plan(config: GRPOConfig | SupervisedConfig, refusals: Sequence[str] | None = None) -> Plan:
    """All sections of the plan, and the reasons to refuse the run; `refusals`: `plan_problems`, if they are known."""
    problems = list(plan_problems(config) if refusals is None else refusals)
    config, gpu_memory = with_gpus_here(config) if config.cluster.device == "cuda" else (config, "")
    prompts: int | str = "see the first line"
    examples = Examples(None, config.max_sequence_tokens, f"the most, {config.sequence_keys}")
    try:
        if isinstance(config, GRPOConfig):
            prompts = prompts_per_epoch(config.data)
        else:
            examples = Examples.of(config)
            config = config.with_steps(examples.rows) if examples.rows else config
    except ValueError as error:
        problems += [] if str(error) in problems else [str(error)]
    warnings = list(config.warnings())
    if isinstance(config, GRPOConfig):
        problems += arithmetic_problems(config, prompts)
        warnings += idle_warnings(config)
    label = "would not start: "
    first = [line for n, text in enumerate(problems) for line in wrapped(" " * len(label) if n else label, text)]
    batches = _batches(config, prompts) if isinstance(config, GRPOConfig) else _example_batches(config, examples)
    sections = [("Batches", batches)]
    if config.run.steps:
        warnings += learning_rate_warnings(config)
        sections.append(("Learning rate", _learning_rate(config)))
    sections.append(("Placement", _placement(config, gpu_memory)))
    lines, more_sections = _memory_sections(config, examples, problems, warnings)
    first += lines
    sections += more_sections
    if of_hub := ", ".join(dict.fromkeys(_hub_names(config))):
        first += wrapped("not checked: ", f"{of_hub}: the hub is asked when the run starts.")
    sections.append(("Warnings", [line for warning in warnings for line in wrapped("  - ", warning)]))
    texts = ["\n".join(first), *(f"{title}\n" + "\n".join(lines) for title, lines in sections if lines)]
    return Plan("\n\n".join(texts) + "\n", problems)


def _memory_sections(
    config: GRPOConfig | SupervisedConfig, examples: Examples, problems: list[str], warnings: list[str]
) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The verdict on memory, in lines, and the sections about time and memory; adds to `problems` and `warnings`."""
    sections: list[tuple[str, list[str]]] = []
    try:
        shape = read_shape(config.model.path)
    except ValueError as error:
        is_known = config_at(config.model.path) is None and any(each.startswith("model.path=") for each in problems)
        if isinstance(config, GRPOConfig) and (time := step_time(config, None)):
            sections = [("Time, expected", rows(*time_rows(config, time)))]
        return ([] if is_known else wrapped("memory is not known: ", str(error))), sections
    estimates = memory_of_roles(config, shape)
    if isinstance(config, GRPOConfig):
        searched = search_until_fit(config, shape) if config.cluster.device == "cuda" else []
        verdict = fit_verdict(config, shape, estimates, lambda each: step_time(each, shape), searched)
        if verdict.fits and (warning := preemption(config, shape)):
            warnings.append(warning)
        if isinstance(verdict.config, GRPOConfig) and (time := step_time(verdict.config, shape)):
            title = "Time, expected" if verdict.fits else "Time, expected, in the layout that fits"
            sections.append((title, rows(*time_rows(verdict.config, time))))
        sections.append(("Layouts, seconds per step", _layouts(config, searched)))
    else:
        verdict = fit_verdict(config, shape, estimates, lambda each: update_time(each, shape, examples.tokens))
    problems += [] if verdict.fits else [verdict.text]
    sections.append(("Memory, estimated", _memory(config, shape, estimates)))
    if isinstance(config, GRPOConfig):
        sections.append(("Weights to the engines, estimated", rows(*transfer_rows(config, shape))))
    lines = [line for text, keys in verdict.sentences for line in wrapped("", text) + [f"  {keys}"] * bool(keys)]
    return lines, sections


def _hub_names(config: TrainingProgramConfig) -> Iterator[str]:
    """`key=name` of the data sets and models that are not files on this machine."""
    sources = config_sources(config.data, "train") | config_sources(config.data, "eval")
    yield from (f"{k}={s.path}" for k, s in sources.items() if s.path != ENVIRONMENT and local_path(s) is None)
    models = run_models(config)
    yield from (m.label for m in models if not looks_local(m.path) and local_model_config(m.path) is None)


def _layouts(config: TrainingProgramConfig, searched: Sequence[Search]) -> list[str]:
    """The seconds of each kind of layout with its keys to paste, or the reason why none fits."""
    lines = []
    for gpus, layouts in searched:
        fastest = min((each.seconds for each in layouts.values() if isinstance(each, Layout)), default=0.0)
        for kind, layout in layouts.items():
            label = f"{quantity(gpus, 'GPU')}, {kind}"
            if isinstance(layout, Layout):
                keys = changed_keys(config, layout.config)
                as_set = f", {AS_SET}" if keys == AS_SET else ""
                best = ", the fastest" * (layout.seconds == fastest)
                lines += rows((label, f"{layout.seconds:,.1f} s{best}{as_set}")) + [f"    {keys}"] * (not as_set)
            else:
                lines += rows((label, f"none: {layout}"))
    return lines


def rows(*pairs: tuple[str, str]) -> list[str]:
    """Label and value side by side; long values continue below their own beginning."""
    return [line for label, value in pairs for line in wrapped(f"  {label:<{LABEL}}", value)]


def wrapped(first: str, text: str) -> list[str]:
    """Text after a label, broken at COLUMNS and continued under its own beginning."""
    indent = " " * len(first)
    lines = textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [first.rstrip()]


def _train_sources(data: DatasetsConfig[S]) -> Iterator[tuple[S, int | None]]:
    """Each source of data.train with its number of rows, None if it is no local file. ValueError if unreadable."""
    for key, source in config_sources(data, "train").items():
        check_source(source, key)
        try:
            yield source, count_rows(source)
        except (OSError, ValueError) as error:
            raise ValueError(f"{key}={source.path}: {error}") from None


def prompts_per_epoch(config: DataConfig) -> int | str:
    """Rows of data.train per epoch, including rows that the run drops later; or the reason why they are not counted."""
    rows: dict[str, range] = {}
    for source, count in _train_sources(config):
        if count is None:
            return f"{source.path} is no local file"
        rows[source.label] = range(count)
    return sum(rows_per_epoch(config.train, rows).values())


class Examples(NamedTuple):
    """The examples of a supervised program, from the size of its files."""

    rows: int | None  # per pass; None if data.train is not on this machine
    tokens: int  # mean length of a sequence
    how: str  # the source of `tokens`

    @classmethod
    def of(cls, config: SupervisedConfig) -> Examples:
        """Count rows and bytes of local files; sequences of other data are assumed to have full length."""
        most, rows, size, texts = config.data.max_tokens, 0, 0, True
        longest = f"the most, data.max_tokens={most}"
        for source, count in _train_sources(config.data):
            path = local_path(source)
            if path is None or count is None:
                return cls(None, most, longest)
            rows, size, texts = rows + count, size + path.stat().st_size, texts and path.suffix != ".parquet"
        if not texts or not rows:
            return cls(rows, most, longest)
        each = size / rows / config.sequences_per_example
        tokens = max(1, min(most, round(each / BYTES_PER_TOKEN)))
        return cls(rows, tokens, f"{each:,.0f} bytes of data.train / {BYTES_PER_TOKEN}, at most data.max_tokens={most}")


def _example_batches(config: SupervisedConfig, examples: Examples) -> list[str]:
    each, data = config.examples_per_update, [("data", "not counted here")]
    if examples.rows is not None:
        passes = config.updates_per_epoch(examples.rows)
        data = [("data", f"{examples.rows:,} rows / {each:,} = {quantity(passes, 'optimizer step')} per pass")]
        if config.run.steps:
            data.append(("optimizer steps", f"{config.steps:,} = {config.steps / max(1, passes):,.2f} passes"))
    sequences = f"{config.sequences_per_example} per example, of {examples.tokens:,} tokens on average ({examples.how})"
    speeds = [("speeds", card_description(config))] if config.cluster.device == "cuda" else []
    return rows(
        ("examples per update", f"learner.{config.examples_key}={each:,}"), *data, ("sequences", sequences), *speeds
    )


def _batches(config: GRPOConfig, prompts: int | str) -> list[str]:
    rollout, learner = config.rollout, config.learner
    per_step, longest = config.rollouts_per_step, config.max_sequence_tokens
    minibatch = -(-per_step // learner.minibatches_per_epoch)
    budget, shards = config.row_tokens, config.cluster.data_shards
    microbatches = -(-minibatch // (budget // longest))
    by_shard = f"{-(-microbatches // shards):,} per learner"
    if (shared := config.cluster.sequence_parallel) > 1:
        by_shard = (
            f"{-(-microbatches // shards):,} per {shared} learners, of {learner.max_tokens_per_microbatch:,} each"
        )
    by_role = [_update_row(role.name, training) for role, training in config.trained_roles()]
    response = "response" if rollout.max_rollout_tokens is None else "rollout"
    passes = [name for name, on in (("old", config.needs_old_logprobs_pass), ("ref", config.needs_reference)) if on]
    if (teacher := config.algo.teacher) is not None and teacher.computed:
        passes.append("teacher in each epoch" if teacher.in_loss else "teacher")
    return rows(
        ("rollouts per step", f"{rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt} = {per_step:,}"),
        ("rollouts in total", f"{quantity(config.run.steps, 'step')} x {per_step:,} = {config.run.steps * per_step:,}"),
        ("minibatch", f"{per_step:,} / {learner.minibatches_per_epoch} = {per_step / learner.minibatches_per_epoch:,g}"
         " rollouts, one optimizer step each"),
        *by_role,
        ("data", _epochs_text(config, prompts)),
        ("longest sequence", f"{config.data.max_prompt_tokens:,} prompt + {rollout.longest:,} {response} = "
         f"{longest:,} tokens"),
        ("tokens per step, at most", f"{per_step:,} x {longest:,} = {per_step * longest:,}, of which sampled "
         f"{per_step * rollout.longest:,}"),
        ("microbatches, at most", f"{microbatches:,} of {budget:,} tokens per minibatch, {by_shard}"),
        ("passes before the update", f"log-probs of {' and '.join(passes)} policy" if passes else "none"),
    )  # fmt: skip


def _epochs_text(config: GRPOConfig, prompts: int | str) -> str:
    if isinstance(prompts, str):
        return f"not counted: {prompts}"
    if not prompts:
        return "no rows"
    each, steps, curriculum = config.rollout.prompts_per_step, config.run.steps, config.data.curriculum
    acts = "" if curriculum is None else f"; the curriculum acts after {curriculum.warmup_epochs:g}"
    return (
        f"{prompts:,} rows / {each:,} = {prompts / each:,.1f} steps per epoch; "
        f"{quantity(steps, 'step')} = {steps * each / prompts:,.2f} epochs{acts}"
    )


def _update_row(name: str, training: Training) -> tuple[str, str]:
    steps = quantity(training.steps - training.idle_steps, "step")
    epochs = quantity(training.epochs_per_step, "epoch")
    minibatches = quantity(training.minibatches_per_epoch, "minibatch")
    note = f"; none in the first {quantity(training.idle_steps, 'step')}" if training.idle_steps else ""
    return f"optimizer steps, {name}", f"{steps} x {epochs} x {minibatches} = {training.total_updates:,}{note}"


def _learning_rate(config: TrainingProgramConfig) -> list[str]:
    lines = []
    for role, training in config.trained_roles():
        schedule, lr = training.section.schedule, training.section.optimizer.lr
        warmup, last = training.warmup_updates, training.total_updates
        shape = f"{schedule.name}, peak {lr:g}"
        lines.append((f"schedule, {role.name}", shape + (f", warm-up of {warmup:,} optimizer steps" if warmup else "")))
        for name, update in (("first", 1), ("middle", -(-last // 2)), ("last", last)):
            rate = learning_rate(update, **training.schedule_arguments)
            lines.append((f"{name} optimizer step", f"{rate:.4g}  (step {update:,})"))
    return rows(*lines)


def _placement(config: TrainingProgramConfig, gpu_memory: str) -> list[str]:
    cluster, roles = config.cluster, config.roles()
    if cluster.device == "cpu":
        cpus = sum(role.count * role.cpus for role in roles)
        who = ", ".join(quantity(role.count, role.name) for role in roles)
        return rows(("on CPU", f"{who}; CPU cores reserved: {cpus:g}"))
    nodes = quantity(count_nodes(roles, cluster.gpus_per_node), "node")
    kinds = [("GPUs", f"{count_gpus(roles)} on {nodes} of {cluster.gpus_per_node}"), ("memory of a GPU", gpu_memory)]
    for role in roles:
        each = f"{quantity(role.gpus, 'GPU')} each" if role.gpus else "on the GPUs of the learners"
        stage = f", ZeRO stage {role.training.section.zero_stage}" if role.training is not None else ""
        shared = f", {cluster.sequence_parallel} share each sequence" * bool(stage and cluster.sequence_parallel > 1)
        kinds.append((f"{role.name}s", f"{role.count}, {each}{stage}{shared}"))
    if isinstance(config, GRPOConfig) and config.cluster.placement == "separate" and not config.rollout.max_policy_lag:
        kinds.append(("rollout.max_policy_lag=0", "engines and learners take turns, so one of the two is always idle"))
    return rows(*kinds)


def _memory(config: TrainingProgramConfig, shape: ModelShape, estimates: Sequence[RoleMemory]) -> list[str]:
    cluster, longest = config.cluster, config.max_sequence_tokens
    sources: dict[str, list[str]] = {}  # source of sizes -> names of hub models
    for path, known in {estimate.role.model: estimate.shape for estimate in estimates}.items():
        if known is not None:
            sources.setdefault(known.source, []).extend([] if looks_local(path) else [path])
    lines = rows(
        ("model", f"{shape.model_type}, {shape.parameters:,} parameters"),
        *(("sizes from", source + f" ({', '.join(of)})" * bool(of)) for source, of in sources.items()),
        ("checkpoint on disk", _checkpoint(config, shape)),
    )
    for estimate in estimates:
        title = with_article(estimate.role.name)
        if estimate.parts:
            lines += _parts(f"{title}, {'one GPU' if cluster.device == 'cuda' else 'processes'}", estimate.parts)
        else:
            lines.append(f"  {title}: no estimate, because its config.json is missing or not supported")
    if not isinstance(config, GRPOConfig):
        return lines
    per_token, tokens = kv_cache(shape, config)
    at_once = min(config.rollout.max_concurrent_sequences, -(-config.rollouts_per_step // config.cluster.engines))
    return [*lines, *rows(
        ("the KV cache holds", f"{tokens:,} tokens of {per_token / 1024:,.1f} KiB = {tokens // longest:,} sequences of "
         f"{longest:,}; {at_once:,} at once"),
    )]  # fmt: skip


def _checkpoint(config: TrainingProgramConfig, policy: ModelShape) -> str:
    size, every = checkpoint_bytes(config, policy), config.checkpoint_every
    if size is None:
        return "no estimate"
    reference = ", and a changing reference" if config.reference_moves else ""
    interval = "step" if every == 1 else f"{every} steps"
    when = f"one every {interval}, {config.checkpoint.kept} are kept" if every else "none is saved"
    return f"{size / GIB:.1f} GiB (float32 weights and moments of all trained models{reference}); {when}"


def _parts(title: str, parts: tuple[Part, ...]) -> list[str]:
    table = [*((part.name, part.size) for part in parts), ("total", total(parts))]
    return [f"  {title}", *(f"    {name:<40}{size / GIB:8.2f} GiB" for name, size in table)]


def transfer_rows(config: GRPOConfig, shape: ModelShape) -> list[tuple[str, str]]:
    """Bytes and seconds of a weight transfer to the engines: of all weights, and of changes only.

    No rows if nothing goes over a network: on shared GPUs, through memory of one machine, or with adapters.
    """
    local = config.cluster.placement == "colocated" or (config.cluster.device == "cpu" and not config.sends_changes)
    if local or config.model.lora is not None:
        return []

    def sent(size: float) -> str:
        gbit = config.plan.network_gbit_per_second
        return f"{size / GIB:,.2f} GiB, {8 * size / (gbit * 1e9):,.2f} s at {gbit:g} Gbit/s"

    bytes_each, lr, updates = BYTES[config.model.dtype], config.learner.optimizer.lr, config.training.updates_per_step
    size = shape.parameters * bytes_each
    table = [("everything", f"{shape.parameters / 1e9:.3f} B x {bytes_each} bytes = {sent(size)}")]
    if config.model.dtype == "bfloat16":
        share = min(1.0, updates * CHANGED_AT_1E6 * (lr / 1e-6) ** CHANGED_EXPONENT)
        how = f"over {MOST_CHANGED:.0%}: everything is sent"
        if share <= MOST_CHANGED:
            how = f"x {BYTES_PER_CHANGE} bytes = {sent(shape.parameters * share * BYTES_PER_CHANGE)}"
        changes = f"{quantity(updates, 'update')} at lr {lr:g}, about {share:.2%} of the elements"
        table.append(("changes alone", f"{changes} {how}"))
    if config.sends_changes:
        held = f"{size / GIB:.2f} GiB per node with engines, {size / config.cluster.learners / GIB:.2f} per learner"
        table.append(("host memory", held))
    return table


def arithmetic_problems(config: GRPOConfig, prompts: int | str) -> Iterator[str]:
    """Numbers that refuse the run: too few prompts in an epoch, an engine larger than a node."""
    cluster = config.cluster
    if isinstance(prompts, int) and (problem := too_few_prompts(prompts, config.rollout.prompts_per_step)):
        yield problem
    if cluster.device == "cuda" and cluster.tensor_parallel > cluster.gpus_per_node:
        yield (
            f"cluster.tensor_parallel={cluster.tensor_parallel}: an engine does not fit on a node of cluster."
            f"gpus_per_node={cluster.gpus_per_node} GPUs. Lower it, or set gpus_per_node to what a node has."
        )


def idle_warnings(config: GRPOConfig) -> Iterator[str]:
    """Warn of idle learners and engines."""
    cluster, rollout = config.cluster, config.rollout
    for role, training in config.trained_roles():
        smallest = config.rollouts_per_step // training.minibatches_per_epoch
        if smallest < (shards := cluster.data_shards):
            who = quantity(role.count, role.name)
            if cluster.sequence_parallel > 1:
                who = f"{shards} groups of {role.name}s that share sequences"
            yield (
                f"{role.section}.minibatches_per_epoch={training.minibatches_per_epoch}: a minibatch has {smallest} "
                f"rollouts (rollout.prompts_per_step x rollout.samples_per_prompt / minibatches_per_epoch), so "
                f"{shards - smallest} of {who} are idle. Use fewer cluster.learners or "
                "minibatches, or more rollouts."
            )
    if rollout.prompts_per_step < cluster.engines:
        yield (
            f"cluster.engines={cluster.engines}: a step has rollout.prompts_per_step={rollout.prompts_per_step} "
            f"groups, and a group stays on one engine, so {cluster.engines - rollout.prompts_per_step} engines are "
            "idle. Use fewer engines or more prompts."
        )
