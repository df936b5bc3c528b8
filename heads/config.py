"""The base of every part's config: strict, closed, frozen, with its field docstrings as descriptions."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A part's numbers. Unknown keys and wrong types are errors; a value never changes after it was validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())
