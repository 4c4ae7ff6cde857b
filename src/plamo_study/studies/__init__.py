"""One folder a chapter: its question, its plan, its work in a worker (no pandas), and what its page computes.

What a chapter says about itself stands in the `__init__` of its folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass

HISTORY = "commit 53f8ee5"  # which had the plans of these rows


@dataclass(frozen=True)
class Study:
    """What is measured under one name. `where`: the function that plans it, by its module in the chapter's folder or by
    its whole name; HISTORY: no longer measured, its rows are kept.

    `at_mini`: of trained weights, and so of the embedded models, whatever scale is asked for. `aside`: shown as
    recorded, never measured by a live notebook. `whole`: times nothing and is meaningless in part.
    """

    where: str
    at_mini: bool = False
    aside: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Chapter:
    """A notebook, its question, and its studies by name.

    `of_full_size`: its title speaks of models of full size. `of_all`: it shows rows of any study, and so comes
    last. `of_pairs`: its files have to be of one model. `first`: where a scale and a sweep become the values of a first
    page, which is shown before all is measured.
    """

    notebook: str
    question: str
    studies: Mapping[str, Study]
    of_full_size: bool = False
    of_all: bool = False
    of_pairs: bool = False
    first: str = ""
