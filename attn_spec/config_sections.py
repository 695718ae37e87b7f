"""Sections of attn.yaml: precision, and how a module is given its cache where names can't tell."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from attn_spec.config_words import SIZE_WORDS, words_known

CACHE_WORDS = (*SIZE_WORDS, "$batch", "$capacity")
Made = Annotated[Any, AfterValidator(lambda value: words_known(value, CACHE_WORDS))]


DTYPE = Literal["float64", "float32", "bfloat16", "float16"]


class Section(BaseModel):
    """A mapping with known keys."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class PrecisionConfig(Section):
    """The dtypes that scores, weights and sums are rounded to, for inputs of half precision."""

    scores: DTYPE | None = None
    """The dtype of the logits, before the softmax."""
    weights: DTYPE | None = None
    """The dtype of the weights, when they are multiplied by v."""
    accumulate: DTYPE | None = None
    """The dtype that the products are summed in."""


class CacheConfig(Section):
    """How a module keeps its keys and values from one call to the next."""

    kind: Literal["object", "returned", "inside", "built", "positions"] | None = None
    """object: forward is given one that has `update`; returned: forward gives keys and values back; inside: kept by the
    module after `use_cache=True`; built: made by `build_kv_cache`; positions: buffers, written at `start_pos`."""
    parameter: str | None = None
    """The argument of forward that takes the cache."""
    made_of: str | None = Field(default=None, alias="class")
    """The class of an object that is the cache, by its dotted name; one is made for each sequence."""
    arguments: dict[str, Made] = Field(default_factory=dict)
    """What that class is given; beside the sizes in use, $batch is the number of samples and $capacity that of
    positions."""
    reset: str | None = None
    """The method of the module that empties its cache."""

    def declared(self) -> dict[str, Any]:
        """What is said, by key."""
        return {key: value for key, value in self.model_dump(by_alias=True).items() if value not in (None, {})}
