"""Chat template -> ids, and the loss mask from generation boundaries.

The mask is never searched for in rendered text: the ids before a generation are the prompt (mask 0), the ids the target
wrote are the answer (mask 1, end of turn included). What the template puts between two turns is rendered and tokenised on its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from transformers import AutoTokenizer, GenerationConfig

from data.prompts import Conversation
from heads.config import Config
from heads.errors import UserError

Message = dict[str, str]
TemplateVariables = dict[str, bool | int | float | str]


class ChatConfig(Config):
    """How messages become text."""

    template_variables: TemplateVariables = Field(default_factory=dict)
    """Given to the chat template beside the messages, as in `enable_thinking: false`, in preparation, training and evaluation."""


class ServeConfig(Config):
    """How the target will be served; a corpus whose prompts would look otherwise is refused."""

    template_variables: TemplateVariables | None = None
    """What the server gives the chat template; None: what chat.template_variables says."""
    system: str | None = None
    """The system message the server's clients send; None: what the prompts have."""


class ChatTemplate:
    """A tokenizer with its chat template and its end-of-turn ids."""

    def __init__(self, tokenizer: Any, extra_stop_ids: Sequence[int] = (), variables: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            variables: what the template is given besides the messages.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the target's tokenizer has no chat template; use an instruct model, or put chat_template.jinja beside its tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.variables = dict(variables or {})
        stops = {int(i) for i in extra_stop_ids}
        if tokenizer.eos_token_id is not None:
            stops.add(int(tokenizer.eos_token_id))
        if not stops:
            raise UserError("the target names no end-of-turn token (eos_token_id in its tokenizer or generation_config.json); set one")
        self.stop_ids = frozenset(stops)

    @classmethod
    def load(
        cls, path: str, revision: str | None = None, trust_remote_code: bool = False, variables: Mapping[str, Any] | None = None
    ) -> ChatTemplate:
        """The tokenizer of a target, with the end-of-turn ids of its generation config."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UserError(f"the tokenizer of target '{path}' cannot be loaded ({str(error).splitlines()[0]})") from error
        try:
            eos = GenerationConfig.from_pretrained(path, revision=revision or "main").eos_token_id
        except OSError:
            eos = None
        return cls(tokenizer, [] if eos is None else [eos] if isinstance(eos, int) else eos, variables)

    @property
    def fingerprint(self) -> str:
        """A hash of template text, variables and stop ids."""
        variables = json.dumps(self.variables, sort_keys=True) if self.variables else ""
        return hashlib.sha256(f"{self.tokenizer.chat_template}{sorted(self.stop_ids)}{variables}".encode()).hexdigest()[:16]

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """The text a server would build from these messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.variables
            )
        except Exception as error:  # jinja raises what the template asks it to
            raise UserError(f"the chat template refuses these messages ({error}); roles were {[m['role'] for m in messages]}") from error
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template has written the special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, specials kept, nothing tidied."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def answer_text(self, answer_ids: Sequence[int]) -> str:
        """What a server would hand back for these ids, and a client would send again as history: no end of turn, no specials."""
        body = list(answer_ids[:-1]) if answer_ids and answer_ids[-1] in self.stop_ids else list(answer_ids)
        return str(self.tokenizer.decode(body, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def continue_ids(
        self, history: Sequence[int], rendered: str, answer: Sequence[int], messages: Sequence[Message]
    ) -> tuple[list[int], str, bool]:
        """The prompt of the next turn.

        Args:
            history: ids of everything so far, the answer included.
            rendered: the text the last turn's prompt was made of.
            answer: ids of the last answer.
            messages: all messages, the answer and the next user turn included.

        Returns:
            (prompt ids, rendered text, continues): ``continues`` is True where the ids extend ``history``. It is False where the template
            rewrites history (drops reasoning, trims blanks): then the next turn is a document of its own, exactly what serving will see.
        """
        text = self.render(messages)
        grown = rendered + self.decode(answer)
        if answer and answer[-1] in self.stop_ids and text.startswith(grown):
            # The seam lies behind a special token, so tokenising what follows by itself gives the ids of the whole.
            return [*history, *self.encode(text[len(grown) :])], text, True
        return self.encode(text), text, False


def opening(conversation: Conversation) -> list[Message]:
    """The messages before the first answer."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return [*system, {"role": "user", "content": conversation.turns[0]}]


def check_fit(conversations: Sequence[Conversation], template: ChatTemplate, max_length: int) -> None:
    """Raise UserError for the first prompt that leaves no room for an answer, before anything is generated or written."""
    for conversation in conversations:
        ids = template.encode(template.render(opening(conversation)))
        if len(ids) >= max_length:
            raise UserError(
                f"the prompt at {conversation.source} is {len(ids)} tokens long, and no answer fits into the context of {max_length}; "
                "shorten or remove it, or raise packing.max_length where the target allows it"
            )
