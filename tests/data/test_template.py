"""Chat templates and the loss mask: what is masked in is what the target wrote, byte for byte, under every kind of template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import data.regenerate
from data.corpus import Document, TokenCorpus
from data.generation import Answer
from data.prompts import Conversation
from data.regenerate import RegenerateConfig, regenerate
from data.template import ChatTemplate
from heads.errors import UserError
from heads.target import FrozenTarget
from tests.tiny import CHATML, scripted_generate, tiny_model, tiny_target, tiny_tokenizer

HEADERS = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + CONTENT + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS.replace("CONTENT", "m['content']"),
    "trims": HEADERS.replace("CONTENT", "m['content'] | trim"),
    "drops reasoning": HEADERS.replace("CONTENT", "m['content'].split('</think>')[-1]"),
}
ANSWERS = {
    "plain": ("An answer.", "Another: naïve ☃ 🙂"),
    "blanks": ("  padded answer \n", "\n\nsecond "),
    "reasoning": ("<think>hm, 2?</think>It is 2.", "<think>again</think>Still 2."),
    "looks like markup": ("user\n\nassistant\n\n", "Say 'assistant' twice: assistant"),
}
CONTINUES = {(t, a) for t in TEMPLATES for a in ANSWERS} - {
    ("trims", "blanks"),
    ("trims", "looks like markup"),
    ("drops reasoning", "reasoning"),
}
"""Where the second prompt begins with the first turn just as it was."""


def tokenizer(text: str, merges: list[tuple[str, str]] | None = None) -> PreTrainedTokenizerFast:
    """Bytes, the tokens of the header templates (the end of turn is id 2), and ``merges``."""
    specials = ["<|pad|>", "<|begin|>", "<|eot|>", "<|head|>", "<|/head|>"]
    merged = [a + b for a, b in merges or []]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges or []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|eot|>", pad_token="<|pad|>")
    fast.chat_template = text
    return fast


def chat(name: str) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer() if name == "chatml" else tokenizer(TEMPLATES[name]))


def answer_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, template: ChatTemplate, turns: tuple[str, ...], answers: list[list[int]]
) -> tuple[list[Document], list[list[int]]]:
    """The documents where the target "writes" these answers, and the prompts that it was given."""
    prompts: list[list[int]] = []

    monkeypatch.setattr(data.regenerate, "generate", scripted_generate(answers, prompts))
    nobody: Any = None
    corpus = TokenCorpus(tmp_path / "corpus", {})
    regenerate([Conversation.make(turns=turns)], nobody, template, corpus, RegenerateConfig(), 400)
    return list(corpus.documents()), prompts


def spans(document: Document) -> list[list[int]]:
    """The runs of masked ids."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], document.mask.astype(int), [0]))))
    return [document.ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2])]


@pytest.mark.parametrize("said", ANSWERS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_masked_spans_are_the_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, said: str) -> None:
    template = chat(name)
    end = template.tokenizer.eos_token_id
    answers = [[*template.encode(text), end] for text in ANSWERS[said]]
    documents, prompts = answer_with(monkeypatch, tmp_path, template, ("One?", "Two?"), answers)

    found = [span for document in documents for span in spans(document)]
    assert found == answers  # ids and end of turn
    assert [template.decode(span[:-1]).encode() for span in found] == [text.encode() for text in ANSWERS[said]]
    assert [f for d in documents for f in d.finish] == ["stop", "stop"]

    history = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": ANSWERS[said][0]},
        {"role": "user", "content": "Two?"},
    ]
    served = template.encode(template.render(history))
    assert prompts == [template.encode(template.render(history[:1])), served]
    if (name, said) in CONTINUES:
        (document,) = documents
        assert document.turns == 2
        assert document.ids.tolist() == served + answers[1]
    else:
        first, second = documents
        assert (first.turns, second.turns) == (1, 1) and first.conversation == second.conversation
        assert first.ids.tolist() == prompts[0] + answers[0]
        assert second.ids.tolist() == served + answers[1]
        assert served[: len(first.ids)] != first.ids.tolist()  # so it had to be a document of its own
        assert second.mask.tolist() == [0] * len(served) + [1] * len(answers[1])


def test_ids_are_never_tokenised_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = ChatTemplate(tokenizer(TEMPLATES["headers"], [("a", "b"), ("ab", "c")]))
    apart = [int(template.tokenizer.convert_tokens_to_ids(c)) for c in "abc"]
    answer = [*apart, 2]
    assert template.encode("abc") != apart and template.decode(apart) == "abc"
    (document,), prompts = answer_with(monkeypatch, tmp_path, template, ("abc", "more"), [answer, answer])
    assert spans(document) == [answer, answer]
    assert prompts[1][: len(prompts[0]) + 4] == prompts[0] + answer
    assert template.encode("abc")[0] in prompts[0]  # the user's text is tokenised as ever


def test_an_answer_that_is_no_valid_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half a character at the cut: the ids stay, though their text cannot give them back."""
    template = chat("chatml")
    half = template.encode("☃")[:2]
    answer = [*template.encode("snow "), *half]
    assert template.encode(template.decode(answer)) != answer
    (document,), _ = answer_with(monkeypatch, tmp_path, template, ("One?", "Two?"), [answer])
    assert spans(document) == [answer] and document.finish == ("length",) and document.turns == 1


def test_a_special_inside_an_answer_is_not_sent_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Serving hands back text without specials; so the next turn cannot continue these ids."""
    template = chat("chatml")
    first = [*template.encode("be"), 1, *template.encode("fore"), 2]
    documents, prompts = answer_with(monkeypatch, tmp_path, template, ("One?", "Two?"), [first, [*template.encode("x"), 2]])
    assert len(documents) == 2 and spans(documents[0]) == [first]
    assert "before<|im_end|>" in template.decode(prompts[1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_masked_spans_are_what_a_real_target_wrote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    template = chat(name)
    model = tiny_model(vocab=len(template.tokenizer), scale=2.0)
    model.lm_head.weight.data[2] *= 3  # so that turns end
    written: dict[str, list[list[int]]] = {}
    real = data.regenerate.generate

    def recording(*args: Any) -> Iterator[Answer]:
        for answer in real(*args):
            written.setdefault(answer.request.key[0], []).append(answer.ids)
            yield answer

    monkeypatch.setattr(data.regenerate, "generate", recording)
    conversations = [Conversation.make(turns=(f"say {i}", "again")) for i in range(12)]
    corpus = TokenCorpus(tmp_path, {})
    config = RegenerateConfig(temperature=4.0, max_new_tokens=60, batch_size=5)
    regenerate(conversations, FrozenTarget(model), template, corpus, config, 400)
    dropped = {d.conversation for d in corpus.dropped()}
    found: dict[str, list[list[int]]] = {}
    for document in corpus.documents():
        found.setdefault(document.conversation, []).extend(spans(document))
        for span, finish in zip(spans(document), document.finish, strict=True):
            assert (span[-1] in template.stop_ids) == (finish == "stop")
    assert set(found) | dropped == {c.id for c in conversations} and not set(found) & dropped
    assert any(len(answers) == 2 for answers in found.values())
    for conversation, answers in found.items():
        # A second answer may have been empty or degenerate, and then it is left out.
        assert answers == written[conversation][: len(answers)]
        assert all(not template.answer_text(a).strip() for a in written[conversation][len(answers) :])


def test_no_template_and_no_end_of_turn() -> None:
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        ChatTemplate(bare)
    endless = tiny_tokenizer()
    endless.eos_token = None
    with pytest.raises(UserError, match="names no end-of-turn token"):
        ChatTemplate(endless)
    assert ChatTemplate(endless, [2]).stop_ids == {2}


def test_a_template_that_refuses_the_messages() -> None:
    template = ChatTemplate(tiny_tokenizer("{{ raise_exception('no system role') }}"))
    with pytest.raises(UserError, match=r"refuses these messages \(no system role\).*'system', 'user'"):
        template.render([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


def test_load_takes_stop_ids_of_the_generation_config(tmp_path: Path) -> None:
    target = tiny_target(vocab=259)
    target.model.generation_config.eos_token_id = [2, 17]
    target.model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert ChatTemplate.load(str(tmp_path)).stop_ids == {2, 17}
    other = ChatTemplate(tiny_tokenizer())
    assert ChatTemplate.load(str(tmp_path)).fingerprint != other.fingerprint
