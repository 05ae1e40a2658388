"""Words of which needles' keys are made: ``adjective-noun``, thousands of them."""

from __future__ import annotations

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

#: Every key.
KEYS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split())
