"""Teachers: the policy learns from their log-probs of the sampled tokens (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from rlhf.config.base import FilePath, NonNegativeInt, Section, key, suggest


class TeacherModel(Section):
    """One teacher: exactly one of `path`, `endpoint` and `own`; none where each source names its own."""

    path: FilePath | None = key(None, "folder or hub name of a model, kept by the learners", resume="free")
    endpoint: str | None = key(
        None, "address of an OpenAI-compatible server with prompt log-probs, http://host:8000/v1", resume="free"
    )
    own: Literal["policy", "average"] | None = key(None, "the policy itself, or the reference with ref_update=average")
    hint_column: str | None = key(None, "column whose text the teacher alone reads, after the last message of a prompt")

    @property
    def named(self) -> str:
        """The keys that name the model, with their values. Empty if none does."""
        given = self.model_dump(include={"path", "endpoint", "own"}, exclude_none=True)
        return " and ".join(f"{name}={value}" for name, value in given.items())

    def problems(self, where: str) -> Iterator[str]:
        """Contradictions within one teacher; `where` is its key."""
        if " and " in self.named or not self.named:
            yield f"{where}: it has {self.named or 'no model'}. Set exactly one of path, endpoint and own."
        if self.own == "policy" and self.hint_column is None:
            reason = "it would agree with the policy on every token. Name the hint_column that it reads in addition."
            yield f"{where}.own=policy without hint_column: {reason}"


class TeacherConfig(TeacherModel):
    """The teachers of a run, and the weight of their judgement."""

    over: Literal["sampled", "vocabulary"] = key(
        "sampled", "what is compared: the sampled tokens, in the advantage; or all tokens at each place, in the loss"
    )
    coef: PositiveFloat = key(1.0, "factor of log pi_teacher - log pi_old in the advantage, or of the KL in the loss")
    reward: Literal["add", "replace"] = key("replace", "add that to the advantage of the reward, or replace it")
    by_source: dict[str, TeacherModel] = key({}, "teachers of single sources of data.train; others have the one above")
    concurrent_requests: PositiveInt = key(32, "sequences that an endpoint is asked for at once", resume="free")
    timeout_s: PositiveFloat = key(60.0, "seconds that one request to an endpoint may take", resume="free")
    retries: NonNegativeInt = key(5, "further tries of a failed request; the wait doubles each time", resume="free")

    def of_source(self, source: str) -> TeacherModel | None:
        """The teacher of the rows of a source."""
        return self.by_source.get(source, self if self.named else None)

    @property
    def by_key(self) -> dict[str, TeacherModel]:
        """Every teacher by its key."""
        own = {"algo.teacher": self} if self.named else {}
        return {**own, **{f"algo.teacher.by_source.{name}": each for name, each in self.by_source.items()}}

    @property
    def in_loss(self) -> bool:
        """True if the loss contains the teacher's KL over the vocabulary, computed in each update."""
        return self.over == "vocabulary"

    @property
    def computed(self) -> bool:
        """True if the learners compute log-probs of teachers, in one pass: every row has one teacher."""
        return any(each.endpoint is None for each in self.by_key.values())

    @property
    def paths(self) -> dict[str, str]:
        """The models that the learners keep, by key. Each model appears once."""
        by_path = {each.path: f"{where}.path" for where, each in reversed(self.by_key.items()) if each.path is not None}
        return {where: path for path, where in reversed(by_path.items())}


def teacher_problems(config: Any) -> Iterator[str]:
    """Contradictions between `algo.teacher` and the rest of a GRPO config; more are in config/contradictions.py."""
    teacher: TeacherConfig | None = config.algo.teacher
    if teacher is None:
        return
    algo = config.algo
    sources, teachers = [source.label for source in config.data.train], teacher.by_key.values()
    if teacher.named or not teacher.by_source:
        yield from teacher.problems("algo.teacher")
    elif teacher.hint_column is not None:
        reason = "no teacher reads it, since by_source names them all. Set it there, for each."
        yield f"algo.teacher.hint_column={teacher.hint_column}: {reason}"
    for name, each in teacher.by_source.items():
        yield from each.problems(f"algo.teacher.by_source.{name}")
        if name not in sources:
            yield f"algo.teacher.by_source.{name}: data.train has no such source. {suggest(name, sources)}"
    if any(each.own == "average" for each in teachers) and not config.reference_is_average:
        remedy = "Set algo.ref_update=average, and algo.log_kl=true or a kl_coef."
        yield f"algo.teacher.own=average with {algo.ref_update=!s}: there is no average. {remedy}"
    if any(each.hint_column for each in teachers) and config.uses_environment_or_tools:
        reason = "an environment writes the prompt, so there is none to add a hint to. Remove one of them."
        yield f"algo.teacher.hint_column with an environment or tools: {reason}"
    if any(each.endpoint for each in teachers) and config.run.deterministic:
        reason = "an endpoint may give other log-probs in a second run. Name a path, or deterministic=false."
        yield f"run.deterministic=true with algo.teacher.endpoint: {reason}"
    for name in sources:
        if teacher.reward == "replace" and teacher.of_source(name) is None:
            remedy = "Name one in by_source or for all sources, or set reward=add."
            yield f"algo.teacher.reward=replace: nothing would train the rows of {name}, without a teacher. {remedy}"
