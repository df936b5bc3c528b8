"""Two tokenizers, one text: tokens as bytes, what a token of one vocabulary is in the other, and a draft model's context kept in step with
the target's tokens (ALGORITHMS 6.1 to 6.4).

Text is counted in bytes of UTF-8, because tokens end inside characters. A token's bytes are those it stands for inside a text: the
tokenizer's space marker is a space, ``<0xE4>`` is the byte E4. Nothing here decides what is emitted: a context or an alignment that is
wrong costs acceptance, never exactness.

Shapes: B sequences, V_T target vocabulary, V_D draft vocabulary (rows of each model's LM head).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from heads.errors import UserError
from heads.sampling import Sampling, probabilities

LOOK_BEHIND = 10
"""Tokens before a seam that are tokenised again together with what follows it."""

DECODERS = ("ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip")
"""Decoder steps whose tokens have bytes of their own, whatever stands beside them."""


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al. 2019): printable bytes stand for themselves, the others follow from U+0100."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


def settled(text: bytes) -> int:
    """Bytes of the text without the incomplete character that it may end in."""
    tail = text[-3:]  # an incomplete character has three bytes at most
    return len(text) - len(tail) + codecs.utf_8_decode(tail, "replace", False)[1]


class Vocabulary:
    """A tokenizer's ids as bytes of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, size: int, whose: str) -> None:
        """
        Args:
            size: V, rows of the model's LM head; ids from there on can neither be read nor given.
            whose: for messages.

        Raises:
            UserError: the tokenizer is not a fast one, or its tokens have no bytes of their own.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"the tokenizer of {whose} is a {type(tokenizer).__name__}; drafting across vocabularies needs a fast one (tokenizer.json)"
            )
        self.tokenizer, self.size = tokenizer, size
        steps = _steps(tokenizer.backend_tokenizer.decoder)
        wrong = [s["type"] for s in steps if s["type"] not in DECODERS or (s["type"] == "Replace" and "String" not in s["pattern"])]
        if wrong or not steps:
            raise UserError(
                f"the tokenizer of {whose} joins tokens in a way that is not known here (decoder {', '.join(wrong) or 'missing'}); "
                f"drafting across vocabularies knows {', '.join(DECODERS)}: give another draft model"
            )
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self.pieces = [b""] * max(size, 1 + max(vocabulary.values(), default=0))
        """[>= V] bytes of each id; none for special tokens and padding rows."""
        byte_forms = set()
        for token, index in vocabulary.items():
            if index not in self.special:
                self.pieces[index], is_byte = _piece(token, steps)
                byte_forms |= {index} if is_byte else set()
        self.by_bytes: dict[bytes, int] = {}
        """Bytes -> the id that stands for them; the plain form where there is a byte form too."""
        for index in sorted(range(size), key=lambda i: (i in byte_forms, i)):
            if self.pieces[index]:
                self.by_bytes.setdefault(self.pieces[index], index)
        probe = self._ids("a", add_special_tokens=True)
        bos = tokenizer.bos_token_id
        self.begin: list[int] = [bos] if bos is not None and probe[:1] == [bos] else []
        """What the tokenizer puts before every text."""

    def _ids(self, text: str | list[str], add_special_tokens: bool = False) -> Any:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)["input_ids"]

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text; bytes that are no UTF-8 become U+FFFD."""
        return list(self._ids(text.decode(errors="replace")))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return list(self._ids(list(texts))) if texts else []

    def text(self, ids: Sequence[int]) -> bytes:
        """Bytes of a whole sequence, special tokens stripped, and the space that the tokenizer itself puts before a text."""
        joined = b"".join(self.pieces[i] for i in ids)
        puts_space = joined[:1] == b" " and self.pieces[next(iter(self.encode(b"a")), 0)][:1] == b" "
        return joined[1:] if puts_space else joined

    def ends(self, ids: Sequence[int], text: bytes) -> list[int]:
        """Where in the text each token ends; -1 where that is unknown (beside what the tokenizer changed, or has no token for).

        Args:
            ids: ``encode(text)``.
        """
        pieces = [self.pieces[i] for i in ids]
        joined = b"".join(pieces)
        lead = joined != text and joined[:1] == b" " and (joined == b" " + text or text[:1] != b" ")
        text = b" " + text if lead else text
        found = [-1] * len(pieces)
        at = 0
        for i, piece in enumerate(pieces):
            if not piece or not text.startswith(piece, at):
                break
            at += len(piece)
            found[i] = at
        at = len(text)
        for i in reversed(range(len(pieces))):
            if found[i] >= 0:
                break
            found[i] = at
            if not pieces[i] or not text.endswith(pieces[i], 0, at):
                break
            at -= len(pieces[i])
        return [end - lead if end >= 0 else -1 for end in found]


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's steps as tokenizer.json has them, sequences opened."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    waiting, steps = [state], []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step["decoders"], *waiting]
        else:
            steps.append(step)
    return steps


BYTE_ALPHABET = _byte_alphabet()


def _piece(token: str, steps: Sequence[dict[str, Any]]) -> tuple[bytes, bool]:
    """A token's bytes, and whether it is written as a byte."""
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        known = all(c in BYTE_ALPHABET for c in token)  # added tokens may hold anything, and stand for themselves then
        return (bytes(BYTE_ALPHABET[c] for c in token) if known else token.encode()), False
    if "ByteFallback" in kinds and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)]), True
    for step in steps:
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        elif step["type"] == "Replace":
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode(), False


@dataclass(frozen=True)
class Crossing:
    """A map from draft tokens to target tokens."""

    image: torch.Tensor
    """[V_D] target id of each draft token; -1: it has none and is never drafted."""
    size: int
    """V_T"""

    def law(self, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """psi: the law of the target token whose draft token is drawn from logits [..., V_D] without those that have no image
        (ALGORITHMS 6.2, 6.3). [..., V_T], in the precision of ``probabilities``."""
        has = self.image >= 0
        q = probabilities(logits.masked_fill(~has, float("-inf")), sampling)
        return q.new_zeros(*q.shape[:-1], self.size).index_add_(-1, self.image[has], q[..., has])


def same_tokens(draft: Vocabulary, target: Vocabulary) -> torch.Tensor:
    """[V_D] the target token of the same bytes, -1 where there is none: the intersection I of TLI (ALGORITHMS 6.3). No special tokens."""
    return torch.tensor([target.by_bytes.get(piece, -1) if piece else -1 for piece in draft.pieces[: draft.size]])


def first_tokens(draft: Vocabulary, target: Vocabulary) -> torch.Tensor:
    """[V_D] the first target token of each draft token's text, -1 where there is none: the map m of SLRS-1 (ALGORITHMS 6.2).

    No special tokens. A token whose bytes are no whole characters has the target token of the same bytes, where there is one.
    """
    image = same_tokens(draft, target)
    texts: dict[int, str] = {}
    for index, piece in enumerate(draft.pieces[: draft.size]):
        try:
            decoded = piece.decode()
        except UnicodeDecodeError:
            continue
        image[index] = -1
        if decoded:
            texts[index] = decoded
    # Tokenizers may put a space before a text; behind something, they do not. What it is matters only where it merges with the text.
    for anchor in ("", "\n", "a", "."):
        encoded = target.encode_all([anchor + text for text in texts.values()])
        for (index, text), ids in zip(list(texts.items()), encoded, strict=True):
            first = _after(target, ids, (anchor + text).encode(), len(anchor))[:1]
            if first:
                image[index] = first[0]
                del texts[index]
    return image


def _after(vocabulary: Vocabulary, ids: Sequence[int], text: bytes, seam: int) -> list[int]:
    """Of ``ids = encode(text)`` those after byte ``seam``, none unless a token ends there, up to the first that is not the text's own."""
    ends = [0, *vocabulary.ends(ids, text)]  # ends[i]: where token i begins
    if seam not in ends:
        return []
    start = len(ends) - 1 - ends[::-1].index(seam)
    tokens = []
    for i in range(start, len(ids)):
        piece = vocabulary.pieces[ids[i]]
        if not piece or ends[i + 1] - ends[i] != len(piece) or ids[i] >= vocabulary.size:
            break
        tokens.append(ids[i])
    return tokens


def continuation(target: Vocabulary, committed: Sequence[int], new: bytes) -> tuple[list[int], bool]:
    """New text as target tokens that continue the committed ones (SLEM, ALGORITHMS 6.1).

    The text of the last LOOK_BEHIND committed tokens and the new one are tokenised together; what lies behind the seam counts only if a
    token ends at the seam. An incomplete character at the end is left out.

    Returns:
        The tokens, and whether they are all of the new text.
    """
    window: list[bytes] = []
    for token in reversed(committed):
        piece = target.pieces[token]
        # A special token cuts the text: the tokenizer never merges across it. A window begins with a whole character.
        if not piece or (len(window) >= LOOK_BEHIND and window[-1][0] & 0xC0 != 0x80):
            break
        window.append(piece)
    known = b"".join(reversed(window))
    whole = (known + new)[: settled(known + new)]
    tokens = _after(target, target.encode(whole), whole, len(known)) if len(whole) > len(known) else []
    return tokens, sum(len(target.pieces[t]) for t in tokens) == len(new)


class DraftText:
    """The text of one sequence, and the draft tokens it is read as (ALGORITHMS 6.4)."""

    def __init__(self, vocabulary: Vocabulary, text: bytes) -> None:
        self.vocabulary, self.text = vocabulary, text
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._covered = 0
        self._retokenise()

    @property
    def context(self) -> list[int]:
        """Ids for the draft model."""
        return [*self.vocabulary.begin, *self._ids]

    @property
    def rest(self) -> bytes:
        """An incomplete character at the text's end that the draft vocabulary has no tokens for; the context ends before it."""
        return self.text[self._covered :]

    def fork(self) -> DraftText:
        """A copy that may be extended on its own."""
        twin = DraftText.__new__(DraftText)
        twin.vocabulary, twin.text, twin._covered = self.vocabulary, self.text, self._covered
        twin._ids, twin._ends = list(self._ids), list(self._ends)
        return twin

    def append(self, piece: bytes, same: int = -1) -> None:
        """Extend the text.

        Args:
            same: a draft token of the same bytes, put behind the context as it is; -1: the text's tail is tokenised anew.
        """
        as_it_is = same >= 0 and not self.rest
        self.text += piece
        if as_it_is:
            self._ids.append(same)
            self._covered = len(self.text)
            self._ends.append(self._covered)
        elif piece:
            self._retokenise()

    def _retokenise(self) -> None:
        end = settled(self.text)
        at = len(self._ids) - LOOK_BEHIND
        while at > 0 and not self._character_at(self._ends[at - 1]):
            at -= 1
        if at <= 0 or not self._splice(at, end):
            self._ids = self.vocabulary.encode(self.text[:end])
            self._ends = self.vocabulary.ends(self._ids, self.text[:end])
        # The bytes of an incomplete character for now; when the next ones come, the window reaches back before it.
        self._covered = end
        while self._covered < len(self.text) and (token := self._byte(self._covered)) >= 0:
            self._covered += 1
            self._ids.append(token)
            self._ends.append(self._covered)

    def _character_at(self, offset: int) -> bool:
        return 0 <= offset < len(self.text) and self.text[offset] & 0xC0 != 0x80

    def _byte(self, offset: int) -> int:
        return self.vocabulary.by_bytes.get(self.text[offset : offset + 1], -1)

    def _splice(self, at: int, end: int) -> bool:
        """Tokenise the text behind token ``at`` - 1 and take the result from the first token on which old and new agree: what comes before
        that may look different for want of the text on its left. False where they agree on none."""
        start = self._ends[at - 1]
        window = self.text[start:end]
        ids = self.vocabulary.encode(window)
        ends = [start + e if e >= 0 else -1 for e in self.vocabulary.ends(ids, window)]
        old = {e: i for i, e in enumerate(self._ends[at:], at) if e >= 0}
        for i, (token, e) in enumerate(zip(ids, ends, strict=True)):
            if e in old and self._ids[old[e]] == token:
                self._ids = [*self._ids[: old[e] + 1], *ids[i + 1 :]]
                self._ends = [*self._ends[: old[e] + 1], *ends[i + 1 :]]
                return True
        return False
