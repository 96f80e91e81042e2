"""Learned rewards: pairs, their loss, normalization, batches of a client, and an endpoint that fails at first."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from worlds import ALONE, make_ppo_config, rollout_of

from rlhf.check.start_checks import input_problems
from rlhf.config.data import TemplateName
from rlhf.config.ppo import PPOConfig
from rlhf.config.reward import MODEL_PART
from rlhf.config.reward_model import RECORD_FILE, PairsConfig, RewardModelConfig, reward_model_record
from rlhf.data.conversations import load_examples, pair_encoder
from rlhf.data.model_files import load_tokenizer, reward_template
from rlhf.data.templates import reward_input
from rlhf.learner.reward_scorer import recorded_normalization
from rlhf.learner.reward_trainer import pair_loss, pair_metrics
from rlhf.reward_model import main
from rlhf.rewards.model_client import RewardModelClient, endpoint_scorer
from rlhf.run.prompts import read_data
from rlhf.types import Prompt, RolloutGroup, ScoredRollout, VersionSpan


def group(name: str, rewards: tuple[float | None, ...]) -> RolloutGroup:
    prompt = Prompt(name, 0, np.array([1]), ({"role": "user", "content": name},), "", "s")
    samples = []
    for sample, reward in enumerate(rewards):
        rollout = rollout_of([1, 2], [0, 1], None, (VersionSpan(1, 2, 0),), prompt_id=name, sample=sample)
        samples.append(ScoredRollout(rollout, f"answer {sample}", "", reward, {"math": reward}, "ok"))
    return RolloutGroup(prompt, tuple(samples))


# --- pairs ---


def test_the_loss_of_a_pair_is_minus_the_log_of_the_probability_that_the_chosen_one_wins() -> None:
    margins = torch.tensor([0.0, math.log(3.0), -math.log(3.0)])
    torch.testing.assert_close(
        pair_loss(margins), torch.tensor([math.log(2), math.log(4 / 3), math.log(4)]), rtol=1e-6, atol=0
    )
    metrics = {name: metric.value() for name, metric in pair_metrics(margins).items()}
    assert metrics == {"accuracy": pytest.approx(1 / 3), "margin": pytest.approx(0.0, abs=1e-7)}


@pytest.mark.parametrize("row", ['{"chosen": "a"}', '{"chosen": [], "prompt": "q"}', "not json"])
def test_a_row_that_is_no_pair_is_named(tmp_path: Path, row: str) -> None:
    from rlhf.learner.tiny_model import make_tokenizer

    good = json.dumps({"prompt": "q\u2028", "chosen": "a", "rejected": "b"}, ensure_ascii=False)
    (tmp_path / "pairs.jsonl").write_text(good + "\n\n" + row + "\n")
    with pytest.raises(ValueError, match=r"data\.train: (row|line) 3 of .*pairs\.jsonl"):
        load_pairs(tmp_path / "pairs.jsonl", make_tokenizer(), "model")


def load_pairs(file: Path, tokenizer: Any, template: TemplateName) -> list[list[int]]:
    config = PairsConfig.model_validate({"train": str(file), "template": template, "max_tokens": 64})
    tokens = load_examples(config, "train", pair_encoder(tokenizer, template)).tokens
    return [ids.tolist() for ids in np.split(tokens.token_ids, tokens.cu_seqlens[1:-1])]


def test_the_normalization_recorded_with_a_model_is_used(tmp_path: Path) -> None:
    assert recorded_normalization(str(tmp_path)) == (0.0, 1.0)
    (tmp_path / "reward_normalization.json").write_text('{"mean": 2.5, "std": 0.5}')
    assert recorded_normalization(str(tmp_path)) == (2.5, 0.5)


def test_the_normalization_and_the_template_of_a_model_in_the_hubs_cache_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--scores"
    for file, text in {
        "refs/main": "abc",
        "snapshots/abc/config.json": "{}",
        f"snapshots/abc/{RECORD_FILE}": '{"mean": 2.5, "std": 0.5, "template": "qa"}',
    }.items():
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        (repository / file).write_text(text)
    assert reward_model_record("somebody/scores")["template"] == "qa"
    assert recorded_normalization("somebody/scores") == (2.5, 0.5)


# --- the model ---


@pytest.fixture(scope="module")
def reward_folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a head of one number, and a recorded normalization."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir / "model", num_labels=1)
    model.float().save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_dir / "model").save_pretrained(folder)
    (folder / "reward_normalization.json").write_text('{"mean": 0.25, "std": 0.5}')
    return folder


def scorer_of(config: RewardModelConfig, **changes: Any) -> Any:
    """A copy of the reward model as a run makes it."""
    from rlhf.learner.reward_scorer import RewardScorer

    cluster, changed = SimpleNamespace(device="cpu"), config.model_copy(update=changes)
    run: Any = SimpleNamespace(cluster=cluster, reward_model=changed, data=SimpleNamespace(clock={}))
    return RewardScorer(run, ALONE, reward_input(run))


def test_the_score_is_the_normalized_output_of_the_head_at_the_last_token_in_any_batch(
    reward_folder: Path,
) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_folder)
    model = AutoModelForSequenceClassification.from_pretrained(reward_folder).float().eval()
    conversations = [
        [{"role": "user", "content": "What is 1 + 2?"}, {"role": "assistant", "content": answer}]
        for answer in ("3", "", "x" * 21, "12 13 06 \\boxed{632}")
    ]
    expected = []
    for messages in conversations:
        ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            states = model.model(input_ids=ids).last_hidden_state
            expected.append((model.score(states)[0, -1, 0].item() - 0.25) / 0.5)
    config = RewardModelConfig(path=str(reward_folder), dtype="float32")
    for budget in (64, 16384):
        scorer = scorer_of(config, max_tokens_per_batch=budget)
        assert scorer.score(conversations) == pytest.approx(expected, abs=1e-5)
    long = [*conversations[0][:1], {"role": "assistant", "content": "y" * 64}]
    tight = scorer_of(config, max_tokens_per_batch=64, mean=0.0, std=1.0)
    assert tight.score([long, conversations[0]]) == [None, pytest.approx(expected[0] * 0.5 + 0.25, abs=1e-5)]


def test_a_model_without_a_head_is_no_reward_model(tiny_model_dir: Path) -> None:
    config = RewardModelConfig(path=str(tiny_model_dir / "model"), dtype="float32")
    with pytest.raises(ValueError, match=r"\bscore\.weight\b"):
        scorer_of(config)


# --- templates ---

CONFIG = Path(__file__).parents[1] / "configs/reward_model_quickstart.yaml"
PROMPT = "The boat left the"


@pytest.fixture(scope="module")
def plain_folder(reward_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same reward model with a tokenizer without a chat template."""
    folder = shutil.copytree(reward_folder, tmp_path_factory.mktemp("plain") / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink()
    return folder


def test_what_a_model_is_trained_on_in_a_template_is_what_it_scores(plain_folder: Path, tmp_path: Path) -> None:
    """Pairs with a text and with messages for a prompt, against the text that the policy has in its sequence."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(plain_folder)
    messages = [{"role": "user", "content": PROMPT}]
    rows = [{"prompt": prompt, "chosen": " shore.", "rejected": " it"} for prompt in (PROMPT, messages)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = load_pairs(tmp_path / "pairs.jsonl", tokenizer, "raw")
    expected = tokenizer(PROMPT + " shore.", add_special_tokens=False)["input_ids"]
    assert pairs[::2] == [expected, expected]

    model = AutoModelForSequenceClassification.from_pretrained(plain_folder).float().eval()
    with torch.no_grad():
        score = model.score(model.model(input_ids=torch.tensor([expected])).last_hidden_state)[0, -1, 0].item()
    scorer = scorer_of(RewardModelConfig(path=str(plain_folder), dtype="float32", template="raw"))
    reply = {"role": "assistant", "content": " shore."}
    assert scorer.score([[*messages, reply]]) == [pytest.approx((score - 0.25) / 0.5, abs=1e-5)]


def test_pairs_for_a_tokenizer_without_a_chat_template_are_refused_with_that_reason(
    plain_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}) + "\n")
    values = {
        "data.train": tmp_path / "pairs.jsonl", "data.eval": "null", "model.path": plain_folder,
        "run.dir": tmp_path / "run",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"^data\.template=model: .*\braw\b"):
        main(["--config", str(CONFIG), *(f"{key}={value}" for key, value in values.items())])
    assert not (tmp_path / "run").exists()


def test_a_side_of_a_pair_without_an_answer_is_named(plain_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "", "chosen": "a", "rejected": ""}) + "\n")
    with pytest.raises(ValueError, match=r"data\.train: row 1\b.*answer of `rejected` is empty"):
        load_pairs(tmp_path / "pairs.jsonl", AutoTokenizer.from_pretrained(plain_folder), "raw")


def ppo(tiny_model_dir: Path, **reward_model: Any) -> PPOConfig:
    sections = {"reward": {"parts": []}, "reward_model": {"dtype": "float32", **reward_model}}
    return make_ppo_config(tiny_model_dir / "model", **sections)


def test_a_reward_model_without_a_chat_template_is_refused_before_the_run_or_read_in_a_named_one(
    tiny_model_dir: Path, plain_folder: Path
) -> None:
    (problem,) = input_problems(ppo(tiny_model_dir, path=str(plain_folder)))
    assert problem.startswith(f"reward_model.path={plain_folder}: its tokenizer has no chat template. Set ")
    assert "reward_model.template" in problem
    assert input_problems(ppo(tiny_model_dir, path=str(plain_folder), template="raw")) == []
    (problem,) = input_problems(ppo(tiny_model_dir, path=str(tiny_model_dir / "model")))
    assert "it has no head score.weight" in problem  # it is the policy's model, which has a template


def test_a_reward_model_is_read_in_the_template_that_is_recorded_with_it_and_no_other(
    tiny_model_dir: Path, plain_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "model")
    (folder / RECORD_FILE).write_text('{"mean": 0.0, "std": 1.0, "template": "qa"}')
    assert reward_template(RewardModelConfig(path=str(folder))) == "qa"
    assert reward_template(RewardModelConfig(path=str(plain_folder))) == "model"
    assert input_problems(ppo(tiny_model_dir, path=str(folder))) == []
    (problem,) = input_problems(ppo(tiny_model_dir, path=str(folder), template="raw"))
    assert problem.startswith("reward_model.template=raw: reward_model.path=")
    assert "was trained with qa. Remove the key" in problem
    with pytest.raises(ValueError, match=r"reward_model\.template=raw with reward_model\.endpoint=http"):
        RewardModelConfig(endpoint="http://h", template="raw")


def test_a_template_that_refuses_the_prompts_of_a_run_is_found_before_anything_starts(
    tiny_model_dir: Path, plain_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(plain_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no such role') }}")
    config = ppo(tiny_model_dir, path=str(folder))
    assert input_problems(config) == []
    with pytest.raises(ValueError, match=r"^reward_model\.template=model: .*no such role"):
        read_data(config, load_tokenizer(config.model))


# --- the client ---


@pytest.mark.parametrize(("by_group", "sizes"), [(False, [2, 4]), (True, [2, 2, 2])])
def test_conversations_that_wait_while_the_model_is_busy_form_one_batch_or_one_per_group(
    by_group: bool, sizes: list[int]
) -> None:
    batches: list[int] = []

    async def score(conversations: list[list[dict[str, str]]]) -> list[float | None]:
        batches.append(len(conversations))
        await asyncio.sleep(0)
        return [float(c[-1]["content"].split()[1]) for c in conversations]

    async def run() -> list[RolloutGroup]:
        client = RewardModelClient([score], weight=0.5, by_group=by_group)
        return await asyncio.gather(*(client.add_to(group(f"p{i}", (1.0, None))) for i in range(3)))

    for graded in asyncio.run(run()):
        # answer 0 scores 0; unscorable responses are unchanged
        assert [s.reward for s in graded.samples] == [1.0, None]
        assert [s.reward_parts[MODEL_PART] for s in graded.samples] == [0.0, 1.0]
    assert batches == sizes


def test_a_response_that_the_model_cannot_hold_is_unscorable() -> None:
    async def score(conversations: list[list[dict[str, str]]]) -> list[float | None]:
        return [None, 2.0]

    (first, second) = asyncio.run(RewardModelClient([score], weight=0.5).add_to(group("p", (1.0, 1.0)))).samples
    assert (first.reward, second.reward) == (None, 2.0)


def test_the_model_alone_judges_what_no_other_part_judged() -> None:
    async def score(conversations: list[list[dict[str, str]]]) -> list[float | None]:
        return [None, 2.0]

    prompt = group("p", (None, None))
    unjudged = tuple(dataclasses.replace(sample, status="not_judged") for sample in prompt.samples)
    ungraded = RolloutGroup(prompt.prompt, unjudged)
    graded = asyncio.run(RewardModelClient([score], weight=0.5).add_to(ungraded)).samples
    assert [(sample.reward, sample.status) for sample in graded] == [(None, "not_judged"), (1.0, "ok")]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_makes_its_response_unscorable_and_no_other(score: float) -> None:
    async def scorer(conversations: list[list[dict[str, str]]]) -> list[float | None]:
        return [score, 2.0]

    (first, second) = asyncio.run(RewardModelClient([scorer], weight=1.0).add_to(group("p", (1.0, 1.0)))).samples
    assert (first.reward, first.reward_parts[MODEL_PART]) == (None, None)
    assert (second.reward, second.reward_parts[MODEL_PART]) == (3.0, 2.0)


# --- the endpoint ---


NO_NUMBERS = {"text": "1.0", "true": True, "object": {"score": False}}  # content of a response -> its score


class Endpoint(BaseHTTPRequestHandler):
    failures = 0
    seen: list[Any] = []  # noqa: RUF012
    authorization: str | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if Endpoint.failures:
            Endpoint.failures -= 1
            if Endpoint.failures % 2:
                self.send_error(503)
            else:  # the connection breaks within the answer
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
            return
        Endpoint.seen.append(body)
        Endpoint.authorization = self.headers["Authorization"]
        contents = [c[-1]["content"] for c in body["conversations"]]
        reply = json.dumps({"scores": [NO_NUMBERS.get(content, len(content)) for content in contents]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr("rlhf.rewards.http_client.FIRST_WAIT_S", 0.01)
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score"
    server.shutdown()
    server.server_close()


def test_a_request_that_fails_is_tried_again_and_scores_are_normalized(endpoint: str) -> None:
    Endpoint.failures = 2
    score = endpoint_scorer(RewardModelConfig(endpoint=endpoint, retries=2, mean=1.0, std=2.0))
    assert asyncio.run(score([[{"role": "assistant", "content": "12345"}]])) == [2.0]


def test_an_endpoint_may_ask_for_a_password_which_no_message_shows(endpoint: str) -> None:
    Endpoint.failures = 1
    with_password = endpoint.replace("://", "://me:fake-p%40ss@")
    score = endpoint_scorer(RewardModelConfig(endpoint=with_password, retries=0))
    with pytest.raises(RuntimeError) as failure:
        asyncio.run(score([[{"role": "assistant", "content": "x"}]]))
    assert "fake-p" not in str(failure.value)
    assert asyncio.run(score([[{"role": "assistant", "content": "12345"}]])) == [5.0]
    assert Endpoint.authorization == "Basic bWU6ZmFrZS1wQHNz"  # me:fake-p@ss


def test_an_endpoint_that_never_answers_is_an_error_with_address_and_reason(endpoint: str) -> None:
    Endpoint.failures = 4
    score = endpoint_scorer(RewardModelConfig(endpoint=endpoint, retries=2))
    with pytest.raises(RuntimeError, match=r"reward_model\.endpoint=http.*\b3 tries\b.*503"):
        asyncio.run(score([[{"role": "assistant", "content": "x"}]]))


@pytest.mark.parametrize("content", NO_NUMBERS)
def test_a_score_that_is_text_or_a_truth_value_is_no_number(endpoint: str, content: str) -> None:
    Endpoint.failures = 0
    score = endpoint_scorer(RewardModelConfig(endpoint=endpoint, retries=1))
    with pytest.raises(RuntimeError, match=r"\b2 tries\b.*\bno finite number\b"):
        asyncio.run(score([[{"role": "assistant", "content": content}]]))
