"""A claim of a card, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: What may become of a claim. Only ``DIFFERS`` speaks against the card.
HOLDS, DIFFERS, UNCHECKED = "holds", "differs", "not checked"


@dataclass(frozen=True)
class Claim:
    """What it is about, as the card has it, as measured here (``None`` where nothing was), one of the three verdicts
    above, and why, where that is not plain."""

    what: str
    claimed: str
    measured: str | None
    verdict: str
    note: str = ""


def same(what: str, claimed: object, measured: object, note: str = "") -> Claim:
    """A claim that holds if both are equal."""
    return Claim(what, str(claimed), str(measured), HOLDS if claimed == measured else DIFFERS, note)


def close(what: str, claimed: float, measured: float, tolerance: float, form: str = "{:.4f}", note: str = "") -> Claim:
    """A claim that holds if the numbers are at most ``tolerance`` apart."""
    verdict = HOLDS if abs(claimed - measured) <= tolerance else DIFFERS
    return Claim(what, form.format(claimed), form.format(measured), verdict, note)


def at_most(what: str, off: float, tolerance: float) -> Claim:
    """A claim that holds if what is measured is off by ``tolerance`` at most."""
    return close(f"{what}, off by", 0.0, off, tolerance)


def unchecked(what: str, claimed: object, why: str) -> Claim:
    """A claim that could not be looked at."""
    return Claim(what, str(claimed), None, UNCHECKED, why)


def all_hold(claims: Sequence[Claim]) -> bool:
    """Whether nothing speaks against the card."""
    return all(claim.verdict != DIFFERS for claim in claims)


def verdict_of(claims: Sequence[Claim], has_card: bool) -> str:
    """All claims in a sentence: what is not there, or was not looked at, does not hold."""
    differing = sum(claim.verdict == DIFFERS for claim in claims)
    open_ = sum(claim.verdict == UNCHECKED for claim in claims)
    if differing:
        return f"{differing} of {len(claims)} claims do not hold."
    if not has_card:
        return "There is no card to hold; what lies in the files does, as far as it was checked."
    return "The card holds." if not open_ else f"The card holds in what was checked; {open_} claims were not."
