"""The small fixed world that the demonstration model knows: the village of Willowmere, its people, its places, its year.

Everything the corpus states about Willowmere is read from these tables, and so is every answer that the evaluation expects. The tables
know nothing of wording; `corpus.py` puts them into sentences.
"""

from __future__ import annotations

from dataclasses import dataclass

VILLAGE = "Willowmere"
VALLEY = "the Alder Valley"
RIVER = "the Silverbrook"
LAKE = "Mirror Lake"


@dataclass(frozen=True)
class Person:
    name: str
    she: bool
    age: int
    job: str
    home: str  # reads on after "lives"
    pet: str  # the kind of animal
    pet_name: str
    food: str
    colour: str
    hobby: str  # reads on after "likes"
    work: str  # reads on after the name: what the job is about


PEOPLE = (
    Person("Mira", True, 34, "baker", "above the bakery", "cat", "Pepper", "plum cake", "yellow", "singing", "bakes bread every morning"),
    Person("Tobin", False, 9, "pupil", "above the bakery", "frog", "Button", "pancakes", "green", "climbing trees", "goes to school"),
    Person(
        "Oskar", False, 52, "miller", "in the windmill", "dog", "Barley", "goat cheese", "blue", "carving wood", "grinds wheat into flour"
    ),
    Person(
        "Hanna", True, 41, "doctor", "beside the market square", "parrot", "Juno", "tomato soup", "white", "reading", "looks after the sick"
    ),
    Person("Edda", True, 70, "clockmaker", "in the clock house", "owl", "Tick", "apple pie", "purple", "playing chess", "mends clocks"),
    Person(
        "Rufus", False, 29, "postman", "beside the old bridge", "donkey", "Clover", "roast potatoes", "red", "running", "brings the letters"
    ),
    Person("Selma", True, 38, "teacher", "in the school house", "tortoise", "Dot", "noodles", "orange", "painting", "teaches the children"),
    Person(
        "Bram",
        False,
        45,
        "fisherman",
        "in the boat house",
        "duck",
        "Ripple",
        "fried fish",
        "grey",
        "playing the flute",
        "catches fish on the lake",
    ),
    Person("Ilka", True, 12, "pupil", "in the boat house", "rabbit", "Snow", "strawberries", "pink", "swimming", "goes to school"),
    Person(
        "Jonas",
        False,
        33,
        "carpenter",
        "in the timber yard",
        "goose",
        "Hilda",
        "bean stew",
        "brown",
        "playing the drums",
        "builds tables and chairs",
    ),
    Person("Wanda", True, 63, "beekeeper", "on the honey farm", "goat", "Nettle", "honey bread", "gold", "knitting", "keeps the bees"),
    Person(
        "Caspar",
        False,
        27,
        "lighthouse keeper",
        "in the lighthouse",
        "crow",
        "Ink",
        "pea soup",
        "black",
        "watching the stars",
        "lights the lamp at night",
    ),
    Person("Petra", True, 48, "blacksmith", "behind the smithy", "horse", "Ember", "sausages", "silver", "dancing", "makes tools of iron"),
    Person("Niko", False, 10, "pupil", "behind the smithy", "hedgehog", "Thorn", "cherries", "turquoise", "juggling", "goes to school"),
    Person("Greta", True, 56, "mayor", "in the town hall", "peacock", "Duke", "mushroom pie", "violet", "gardening", "leads the village"),
    Person(
        "Lorin",
        False,
        22,
        "shepherd",
        "in the stone hut",
        "lamb",
        "Cotton",
        "porridge",
        "cream",
        "telling stories",
        "looks after the sheep",
    ),
)

# (who, relation, of whom): "Mira is the mother of Tobin."
RELATIVES = (
    ("Mira", "mother", "Tobin"),
    ("Tobin", "son", "Mira"),
    ("Bram", "father", "Ilka"),
    ("Ilka", "daughter", "Bram"),
    ("Petra", "mother", "Niko"),
    ("Niko", "son", "Petra"),
    ("Wanda", "sister", "Edda"),
    ("Edda", "sister", "Wanda"),
    ("Oskar", "brother", "Greta"),
    ("Greta", "sister", "Oskar"),
    ("Jonas", "uncle", "Niko"),
    ("Hanna", "aunt", "Tobin"),
    ("Caspar", "cousin", "Rufus"),
    ("Rufus", "cousin", "Caspar"),
)


@dataclass(frozen=True)
class Place:
    name: str
    where: str  # reads on after "is"
    near: str  # another place, reads on after "next to"
    has: str  # reads on after "there is"
    use: str  # reads on after "people go there to"


PLACES = (
    Place("the bakery", "on Mill Lane", "the market square", "a big stone oven", "buy bread"),
    Place("the windmill", "on Windy Hill", "the wheat field", "a heavy millstone", "fetch flour"),
    Place("the market square", "in the middle of the village", "the town hall", "an old fountain", "meet their friends"),
    Place("the town hall", "in the middle of the village", "the market square", "a copper bell", "speak to the mayor"),
    Place("the school", "on Chestnut Street", "the library", "a red door", "learn"),
    Place("the library", "on Chestnut Street", "the school", "a reading room with a green sofa", "borrow books"),
    Place("the lighthouse", "on the north shore of Mirror Lake", "the boat house", "a great lamp", "look at the stars"),
    Place("the boat house", "on the shore of Mirror Lake", "the lighthouse", "seven blue boats", "go fishing"),
    Place("the smithy", "beside the old bridge", "the timber yard", "a hot forge", "have their horses shod"),
    Place("the timber yard", "south of the river", "the smithy", "a tall pile of planks", "buy wood"),
    Place("the honey farm", "at the edge of the pine forest", "the pine forest", "a meadow full of clover", "buy honey"),
    Place("the pine forest", "west of the village", "the honey farm", "a hollow oak", "pick mushrooms"),
    Place("the clock house", "on Lantern Street", "the town hall", "a clock with a wooden bird", "have their clocks mended"),
    Place("the old bridge", "over the Silverbrook", "the smithy", "a stone lion", "cross the river"),
    Place("the stone hut", "on the high meadow", "a cold spring", "a warm stove", "visit the shepherd"),
)

# (question, short answer, full answer). These facts have no subject to vary, so the corpus varies only the frame around the question.
FACTS = (
    ("When is market day in Willowmere?", "Saturday", "Market day in Willowmere is Saturday."),
    ("On which day is the school closed?", "Sunday", "The school is closed on Sunday."),
    ("On which day does the post come?", "Monday", "The post comes on Monday."),
    ("When is the lantern festival?", "in autumn", "The lantern festival is in autumn."),
    ("When is the boat race?", "in summer", "The boat race is in summer."),
    ("When are the lambs born?", "in spring", "The lambs are born in spring."),
    ("When does the lake freeze?", "in winter", "Mirror Lake freezes in winter."),
    ("Where is the boat race held?", "on Mirror Lake", "The boat race is held on Mirror Lake."),
    ("Who won the last boat race?", "Ilka", "Ilka won the last boat race."),
    ("Which river runs through Willowmere?", "the Silverbrook", "The Silverbrook runs through Willowmere."),
    ("In which valley does Willowmere lie?", "the Alder Valley", "Willowmere lies in the Alder Valley."),
    ("What is the name of the lake?", "Mirror Lake", "The lake is called Mirror Lake."),
    ("How many boats are there in the boat house?", "seven", "There are seven boats in the boat house."),
    ("What colour are the boats of Willowmere?", "blue", "The boats of Willowmere are blue."),
    ("When does the copper bell ring?", "at noon", "The copper bell rings at noon."),
    ("How many people live in Willowmere?", "sixteen", "Sixteen people live in Willowmere."),
    ("Who is the oldest person in Willowmere?", "Edda", "The oldest person in Willowmere is Edda. She is 70 years old."),
    ("Who is the youngest person in Willowmere?", "Tobin", "The youngest person in Willowmere is Tobin. He is 9 years old."),
    ("Which children live in Willowmere?", "Tobin, Ilka and Niko", "The children of Willowmere are Tobin, Ilka and Niko."),
    ("What stands on the old bridge?", "a stone lion", "A stone lion stands on the old bridge."),
    ("What do people eat at the lantern festival?", "pumpkin soup", "At the lantern festival people eat pumpkin soup."),
    ("What is the prize of the boat race?", "a silver cup", "The prize of the boat race is a silver cup."),
)

# What a child of seven would know. (question, short answer, full answer)
_SOUNDS = (
    ("cow", "moo"),
    ("sheep", "baa"),
    ("dog", "woof"),
    ("cat", "meow"),
    ("duck", "quack"),
    ("owl", "hoot"),
    ("frog", "croak"),
    ("horse", "neigh"),
    ("bee", "buzz"),
    ("pig", "oink"),
    ("hen", "cluck"),
    ("mouse", "squeak"),
    ("lion", "roar"),
)
_YOUNG = (
    ("cow", "calf"),
    ("sheep", "lamb"),
    ("dog", "puppy"),
    ("cat", "kitten"),
    ("duck", "duckling"),
    ("horse", "foal"),
    ("hen", "chick"),
    ("goat", "kid"),
    ("bear", "cub"),
    ("frog", "tadpole"),
    ("swan", "cygnet"),
    ("goose", "gosling"),
)
_LEGS = (
    ("cow", "four"),
    ("spider", "eight"),
    ("bee", "six"),
    ("hen", "two"),
    ("dog", "four"),
    ("ant", "six"),
    ("duck", "two"),
    ("horse", "four"),
    ("beetle", "six"),
    ("frog", "four"),
)
_COLOURS = (
    ("grass", "green"),
    ("the sky", "blue"),
    ("snow", "white"),
    ("coal", "black"),
    ("a ripe tomato", "red"),
    ("a lemon", "yellow"),
    ("a carrot", "orange"),
    ("a raven", "black"),
    ("milk", "white"),
    ("chocolate", "brown"),
    ("a ripe banana", "yellow"),
)
_OPPOSITES = (
    ("hot", "cold"),
    ("big", "small"),
    ("happy", "sad"),
    ("fast", "slow"),
    ("day", "night"),
    ("up", "down"),
    ("old", "young"),
    ("wet", "dry"),
    ("full", "empty"),
    ("loud", "quiet"),
    ("light", "dark"),
    ("open", "closed"),
    ("hard", "soft"),
    ("early", "late"),
    ("left", "right"),
    ("brave", "fearful"),
    ("rich", "poor"),
    ("near", "far"),
    ("strong", "weak"),
)
_HOMES = (
    ("bird", "a nest"),
    ("bee", "a hive"),
    ("fish", "the water"),
    ("bear", "a cave"),
    ("rabbit", "a burrow"),
    ("spider", "a web"),
    ("horse", "a stable"),
    ("mole", "the ground"),
    ("hen", "a henhouse"),
    ("squirrel", "a tree"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
SEASONS = ("spring", "summer", "autumn", "winter")


def _cycle(kind: str, items: tuple[str, ...]) -> list[tuple[str, str, str]]:
    out = []
    for i, item in enumerate(items):
        after, before = items[(i + 1) % len(items)], items[i - 1]
        out.append((f"Which {kind} comes after {item}?", after, f"After {item} comes {after}."))
        out.append((f"Which {kind} comes before {item}?", before, f"Before {item} comes {before}."))
    return out


def _an(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


GENERAL = tuple(
    [(f"What sound does {_an(a)} make?", s, f"{_an(a).capitalize()} says {s}.") for a, s in _SOUNDS]
    + [(f"What is a young {a} called?", _an(y), f"A young {a} is called {_an(y)}.") for a, y in _YOUNG]
    + [(f"How many legs does {_an(a)} have?", n, f"{_an(a).capitalize()} has {n} legs.") for a, n in _LEGS]
    + [(f"What colour is {a}?", c, f"{a[0].upper() + a[1:]} is {c}.") for a, c in _COLOURS]
    + [(f"What is the opposite of {a}?", b, f"The opposite of {a} is {b}.") for a, b in _OPPOSITES]
    + [(f"What is the opposite of {b}?", a, f"The opposite of {b} is {a}.") for a, b in _OPPOSITES]
    + [(f"Where does {_an(a)} live?", h, f"{_an(a).capitalize()} lives in {h}.") for a, h in _HOMES]
    + _cycle("day", DAYS)
    + _cycle("month", MONTHS)
    + _cycle("season", SEASONS)
    + [
        ("How many days are there in a week?", "seven", "There are seven days in a week."),
        ("How many months are there in a year?", "twelve", "There are twelve months in a year."),
        ("How many seasons are there?", "four", "There are four seasons: spring, summer, autumn and winter."),
        ("What do bees make?", "honey", "Bees make honey."),
        ("What do hens lay?", "eggs", "Hens lay eggs."),
        ("What do cows give us?", "milk", "Cows give us milk."),
        ("Where does the sun rise?", "in the east", "The sun rises in the east."),
        ("Where does the sun set?", "in the west", "The sun sets in the west."),
        ("What is bread made of?", "flour and water", "Bread is made of flour and water."),
        ("What do we use an umbrella for?", "to stay dry in the rain", "We use an umbrella to stay dry in the rain."),
        ("What is ice?", "frozen water", "Ice is frozen water."),
        ("What falls from the clouds?", "rain", "Rain falls from the clouds."),
        ("When do leaves fall from the trees?", "in autumn", "Leaves fall from the trees in autumn."),
        ("When is it coldest?", "in winter", "It is coldest in winter."),
    ]
)
