"""The base of every part's config: strict, closed, frozen, with its field docstrings as descriptions."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A part's numbers. Unknown keys and wrong types are errors; a value never changes after it was validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class HeadConfig(Config):
    """What a recipe can say of every kind of head."""

    init_from: str | None = None
    """A checkpoint folder of another run to start from, with its draft vocabulary: of a head of this kind and shape, or, for peagle, of an
    EAGLE-3 head, whose fusion, layers, norm and LM head are taken."""
