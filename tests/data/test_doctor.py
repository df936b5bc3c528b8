"""The doctor finds each fault where it was put, in every row, and nothing in rows that are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.corpus import Document, TokenCorpus
from data.doctor import answers, check_template, examine, first_difference, pieces
from data.prompts import Conversation
from data.template import ChatTemplate
from heads.errors import UserError
from scripts.inspection import check_serving, examine_corpus, show_documents
from tests.tiny import CHATML, tiny_tokenizer
from train.recipe import Recipe

STOP = 2
PROMPT, ANSWER = [50, 51, 52], [60, 61, 62]


def made(ids: list[int], mask: list[int], finish: tuple[str, ...] = ("stop",), name: str = "c") -> Document:
    return Document(name, "chat", len(finish), finish, np.array(ids, np.int32), np.array(mask, np.uint8))


def good(name: str = "c", turns: int = 1) -> Document:
    ids, mask = [], []
    for _ in range(turns):
        ids += [*PROMPT, *ANSWER, STOP]
        mask += [0, 0, 0, 1, 1, 1, 1]
    return made(ids, mask, ("stop",) * turns, name)


FAULTS: dict[str, Document] = {
    "empty mask": made([*PROMPT, *ANSWER, STOP], [0] * 7, name="f"),
    "answer without prompt": made([*ANSWER, STOP, *PROMPT, *ANSWER, STOP], [1] * 4 + [0] * 3 + [1] * 4, ("stop", "stop"), "f"),
    "answers and finish reasons differ": made([*PROMPT, *ANSWER, STOP], [0, 0, 0, 1, 1, 1, 1], ("stop", "stop"), "f"),
    "end of turn missing": made([*PROMPT, *ANSWER], [0, 0, 0, 1, 1, 1], name="f"),
    "answer behind its end of turn": made([*PROMPT, 60, STOP, 61, STOP], [0, 0, 0, 1, 1, 1, 1], name="f"),
    "cut answer": made([*PROMPT, *ANSWER], [0, 0, 0, 1, 1, 1], ("length",), "f"),
    "answer of one token": made([*PROMPT, STOP], [0, 0, 0, 1], name="f"),
    "longer than a row": made([*PROMPT * 20, *ANSWER, STOP], [0] * 60 + [1] * 4, name="f"),
}
HARD = list(FAULTS)[:5]


def names(documents: list[Document]) -> dict[str, list[int]]:
    return {f.name: f.rows for f in examine(documents, frozenset({STOP}), 40)[0]}


def test_good_rows_have_nothing() -> None:
    assert names([good("a"), good("b", 3), good("c", 2)]) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_in_its_row_alone(fault: str) -> None:
    assert names([good("a"), FAULTS[fault], good("b", 2)]) == {fault: [1]}


def test_every_row_is_looked_at() -> None:
    documents = [good(f"g{i}") for i in range(500)] + [FAULTS["empty mask"]] + [good(f"h{i}") for i in range(20)]
    findings, total = examine(documents, frozenset({STOP}), 40)
    assert total == 521 and [(f.name, f.count, f.rows, f.hard) for f in findings] == [("empty mask", 1, [500], True)]
    many, _ = examine([FAULTS["cut answer"]] * 30, frozenset({STOP}), 40)
    assert {f.name: f.count for f in many} == {"cut answer": 30, "history rewritten": 29} and len(many[0].rows) == 8


def test_history_rewritten_counts_the_further_documents_of_a_conversation() -> None:
    assert names([good("a"), good("b"), good("a"), good("a")]) == {"history rewritten": [2, 3]}


def test_answers_by_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        mask = (rng.random(rng.integers(1, 12)) < 0.5).astype(np.uint8)
        expected, start = [], None
        for at, bit in enumerate([*mask, 0]):
            if bit and start is None:
                start = at
            if not bit and start is not None:
                expected.append((start, at))
                start = None
        assert answers(mask) == expected


def template(text: str = CHATML, **variables: Any) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(text), (), variables)


def test_what_the_template_does() -> None:
    plain = check_template(template())
    assert plain.prefix_stable and plain.generation_prompt == "<|im_start|>assistant\n" and plain.system == "kept"
    forgets = CHATML.replace("for m in messages", "for m in messages if m['role'] != 'assistant'")
    assert not check_template(template(forgets)).prefix_stable
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    assert check_template(template(refuses)).system == "refused"


def test_first_difference() -> None:
    assert first_difference("abc", "abc") is None
    assert first_difference("abcd", "abXd") == "at character 2: 'cd' in training, 'Xd' in serving"
    assert first_difference("ab", "abc") == "at character 2: '' in training, 'c' in serving"


def test_pieces_are_the_whole_document() -> None:
    chat = template()
    stop = next(iter(chat.stop_ids))
    prompt, answer = chat.encode("<|im_start|>user\nhi<|im_end|>\n"), chat.encode("hello")
    document = made(
        [*prompt, *answer, stop, *prompt, *answer], [0] * len(prompt) + [1] * 6 + [0] * len(prompt) + [1] * 5, ("stop", "length")
    )
    shown = pieces(document, chat)
    assert [kind for kind, _ in shown] == ["prompt", "answer", "end", "prompt", "answer"]
    assert "".join(text for _, text in shown) == chat.decode(document.ids.tolist())


def corpus_of(directory: Path, documents: list[Document]) -> TokenCorpus:
    corpus = TokenCorpus(directory, {})
    corpus.append(documents, [])
    return corpus


@pytest.mark.parametrize("fault", FAULTS)
def test_hard_faults_stop_and_others_do_not(tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    chat = template()
    assert chat.stop_ids == {STOP}
    corpus = corpus_of(tmp_path / "corpus", [good("a"), FAULTS[fault]])
    if fault in HARD:
        with pytest.raises(UserError, match=f"{fault} in 1 of 2 documents .*documents \\[1\\]"):
            examine_corpus(corpus, chat, 40)
    else:
        assert "no hard fault" in examine_corpus(corpus, chat, 40)
    assert fault.split()[0] in capsys.readouterr().out
    said = json.loads((tmp_path / "corpus/doctor.json").read_text())
    assert said["documents"] == 2 and [(f["finding"], f["rows"], f["first rows"]) for f in said["findings"]] == [(fault, 1, [1])]


def test_shown_documents_mark_what_the_target_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    chat = template()
    prompt, answer = chat.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"), chat.encode("hello")
    document = made([*prompt, *answer, STOP], [0] * len(prompt) + [1] * (len(answer) + 1))
    show_documents([document] * 9, chat, 2)
    printed = capsys.readouterr().out
    assert printed.count("⟦hello⟧⟪<|im_end|>⟫") == 2 and "document 2," in printed and "document 6," in printed


def test_prompts_that_serving_would_render_otherwise_are_refused() -> None:
    thinking = CHATML.replace("assistant\n' }}", "assistant\n' }}{% if not thinking %}{{ '<think>none</think>' }}{% endif %}")
    talks = [Conversation.make(turns=["hi"], source="p.jsonl:1"), Conversation.make(turns=["ho"], system="Be kind.", source="p.jsonl:2")]

    def check(serve: dict[str, Any], talks: list[Conversation], **variables: Any) -> None:
        recipe = Recipe(name="x", target={"name": "t"}, serve=serve, chat={"template_variables": variables})  # type: ignore[arg-type]
        check_serving(recipe, template(thinking, **variables), talks)

    check({}, talks, thinking=True)
    check({"template_variables": {"thinking": True}}, talks, thinking=True)
    check({"system": "Be kind."}, talks[1:])
    with pytest.raises(UserError, match=r"p\.jsonl:1 would be served as another text, at character .*'<think>none.* in serving"):
        check({"template_variables": {"thinking": False}}, talks, thinking=True)
    with pytest.raises(UserError, match=r"p\.jsonl:1 would be served as another text"):
        check({"system": "Be kind."}, talks)
