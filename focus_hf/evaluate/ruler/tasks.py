"""The rules of RULER's tasks that need no download: what is hidden, what is asked, what counts as an answer.

Hsieh et al., RULER (arXiv 2404.06654), as published in NVIDIA/RULER: ``scripts/synthetic.yaml``,
``scripts/data/synthetic`` and ``scripts/eval/synthetic`` (Apache-2.0). Where ours differ: keys are of our own words
(`KEYS`), and no hay has the key that is asked for; prompts are filled to the last unit that fits, where RULER
goes in larger steps; a space at the end of a prompt goes to the answer, where tokenizers expect it.
"""

from __future__ import annotations

import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

_ADJECTIVES = """
able amber ample ancient aqua arctic basic bitter blank blue bold brave brief bright broad bronze busy calm careful
cheap civil clean clear clever coarse cold cosy crisp cruel curly damp dark dear deep dense dim distant double dry
dull dusty eager early easy empty equal even exact faint fair famous fancy fast fierce final firm flat fond formal
fresh frozen full funny gentle giant glad golden grand gray great green grim happy hard harsh heavy hidden hollow
honest huge humble icy idle jolly keen kind large late lazy lean light little
"""

_NOUNS = """
acorn anchor apple apron arrow badge baker barrel basin basket beach beetle bell bench berry bishop blanket boat
bottle bridge broom bucket button cabin camel candle canvas carpet castle cellar chair cherry circle clock cloud
coat copper cradle crown curtain daisy desk dolphin donkey drawer drum eagle engine falcon farmer feather fence
ferry fiddle flag flute forest fountain garden glove goat grape guitar hammer harbor hat helmet hill horse island
jacket jungle kettle ladder lamp lantern lemon letter lion magnet maple marble meadow mirror monkey mountain needle
nest ocean onion orchard otter
"""

#: Keys of needles: ``adjective-noun``, thousands of them.
KEYS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split())

_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

_NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
_NEEDLE_QUESTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {key} mentioned in the provided text?"
)
_NEEDLE_PREFIX = " The special magic {kind} for {key} mentioned in the provided text is"

_CHAIN_QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_CHAIN_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
_HOPS = 4
#: Sentences of noise in the solved example that goes before every chain (about 500 tokens in RULER).
_EXAMPLE_NOISE = 15

_WORDS_QUESTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text?"
)
_WORDS_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
_ALPHA, _ZETA = 2.0, 1.6449340668482264  # pi^2 / 6, the zeta function at 2


@dataclass(frozen=True)
class Example:
    """One prompt of a task: what a user says, how the answer begins (the model goes on from there), and what must be
    in it.
    """

    question: str
    prefix: str
    answers: tuple[str, ...]

    @property
    def expected(self) -> str:
        """A right answer in words, as it follows the prefix."""
        return " " + " ".join(self.answers)


@dataclass(frozen=True)
class Task:
    """One task.

    Args:
        make: of a source of randomness, the size of the hay and the prompt's length in tokens, an example. With the
            same randomness a larger size is the same question in more hay.
        new_tokens: that a model may take for its answer.
        smallest: the least size.
    """

    make: Callable[[Random, int, int], Example]
    new_tokens: int
    smallest: int = 1


def string_match_all(predicted: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in a prediction, whatever their case (RULER's score of its synthetic tasks)."""
    return sum(answer.lower() in predicted.lower() for answer in answers) / len(answers)


def _number(random: Random) -> str:
    return str(random.randint(1_000_000, 9_999_999))


def _uuid(random: Random) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


def _needle_in_noise(random: Random, size: int, length: int) -> Example:
    """niah_single_1: a needle among sentences that say nothing."""
    key, value = random.choice(KEYS), _number(random)
    return _asked("number", key, value, [_NOISE] * size, random)


def _needle_among_needles(random: Random, size: int, length: int) -> Example:
    """niah_multikey_2: a needle among needles of other keys."""
    place, value = random.randrange(len(KEYS)), _number(random)
    others = (KEYS[place - random.randrange(1, len(KEYS))] for _ in range(size))
    hay = [_NEEDLE.format(kind="number", key=key, value=_number(random)) for key in others]
    return _asked("number", KEYS[place], value, hay, random)


def _uuid_among_uuids(random: Random, size: int, length: int) -> Example:
    """niah_multikey_3: the same where keys and values are UUIDs."""
    key, value = _uuid(random), _uuid(random)
    hay = [_NEEDLE.format(kind="uuid", key=_uuid(random), value=_uuid(random)) for _ in range(size)]
    return _asked("uuid", key, value, hay, random)


def _asked(kind: str, key: str, value: str, hay: list[str], random: Random) -> Example:
    hay.insert(random.randrange(len(hay)), _NEEDLE.format(kind=kind, key=key, value=value))
    return Example(
        _NEEDLE_QUESTION.format(kind=kind, key=key, context="\n".join(hay)),
        _NEEDLE_PREFIX.format(kind=kind, key=key),
        (value,),
    )


def _variables(random: Random, size: int, length: int) -> Example:
    """vt: names that get a value from each other, in noise, after a solved example."""
    solved, asked = _chain(random, _EXAMPLE_NOISE, letters=3), _chain(random, size, letters=5)
    shown = f"{solved.question}{solved.prefix}{solved.expected}\n\n"
    return Example(shown + asked.question, asked.prefix, asked.answers)


def _chain(random: Random, size: int, letters: int) -> Example:
    names = _distinct(random, _HOPS + 1, string.ascii_uppercase, letters)
    value = str(random.randrange(10_000, 99_999))
    values = [value, *(f"VAR {name}" for name in names)]
    sentences = [_NOISE] * size
    places = sorted(random.sample(range(size), len(names)))
    for inserted, (place, name) in enumerate(zip(places, names, strict=True)):
        sentences.insert(place + inserted, f"VAR {name} = {values[inserted]}")
    return Example(
        _CHAIN_QUESTION.format(context="\n".join(sentences), value=value),
        _CHAIN_PREFIX.format(count=len(names), value=value),
        tuple(names),
    )


def _frequent_words(random: Random, size: int, length: int) -> Example:
    """fwe: ``size`` coded words with frequencies of a zeta distribution, the most frequent one replaced by dots."""
    words = _distinct(random, max(5, (length - TASKS["fwe"].new_tokens) // 50), string.ascii_lowercase, 6)
    words[0] = "..."
    text = [word for rank, word in enumerate(words, start=1) for _ in range(int(size * rank**-_ALPHA / _ZETA))]
    random.shuffle(text)
    return Example(_WORDS_QUESTION.format(context=" ".join(text)), _WORDS_PREFIX, tuple(words[1:4]))


def _distinct(random: Random, count: int, letters: str, length: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(random.choices(letters, k=length))] = None
    return list(words)


#: RULER's names. The least sizes: a place for each name of a chain; enough words that the fourth is said more often
#: than the fifth.
TASKS = {
    "niah_single_1": Task(_needle_in_noise, new_tokens=128),
    "niah_multikey_2": Task(_needle_among_needles, new_tokens=128),
    "niah_multikey_3": Task(_uuid_among_uuids, new_tokens=128),
    "vt": Task(_variables, new_tokens=30, smallest=_HOPS + 1),
    "fwe": Task(_frequent_words, new_tokens=50, smallest=73),
}
