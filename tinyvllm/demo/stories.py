"""A generator of short stories: a cast, a shape, and sentences with many forms.

A story keeps its promises: who is called what, who is she and who is he, what was lost is what is found. That consistency is what the
demonstration model has to learn, so every name, object and place of a story is fixed in `Story.words` before its first sentence.

Templates: `{name}` takes a word of the story, `[a|b|c]` chooses one form (nested at will; an empty form is allowed).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache

Node = str | tuple[str, str] | tuple[tuple["Node", ...], ...]  # text, ("{", key), or a choice of sequences

_TOKEN = re.compile(r"[\[\]|]|\{\w+\}|[^\[\]|{]+")


@cache
def _parse(template: str) -> tuple[Node, ...]:
    tokens = _TOKEN.findall(template)
    at = 0

    def sequence(inside: bool) -> tuple[Node, ...]:
        nonlocal at
        nodes: list[Node] = []
        while at < len(tokens):
            token = tokens[at]
            if inside and token in "|]":
                break
            at += 1
            if token == "[":
                forms = [sequence(True)]
                while tokens[at] == "|":
                    at += 1
                    forms.append(sequence(True))
                at += 1
                nodes.append(tuple(forms))
            elif token[0] == "{":
                nodes.append(("{", token[1:-1]))
            else:
                nodes.append(token)
        return tuple(nodes)

    return sequence(False)


def _expand(nodes: tuple[Node, ...], rng: random.Random, words: dict[str, str], out: list[str]) -> None:
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
        elif node[0] == "{":
            value = words[node[1]]  # type: ignore[index]
            if "{" in value or "[" in value:
                _expand(_parse(value), rng, words, out)
            else:
                out.append(value)
        else:
            _expand(rng.choice(node), rng, words, out)  # type: ignore[arg-type]


_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU](?!ne\b|ni))")
_START = re.compile(r"(?:^|[.!?] |[.]\" |\n|(?<=[ \n])\"|^\")([a-z])")


def tidy(text: str) -> str:
    """One space between words, "an" before vowels, a capital at the head of every sentence and of every speech."""
    text = re.sub(r" {2,}", " ", text).strip()
    text = re.sub(r" ([,.!?])", r"\1", text)
    text = _ARTICLE.sub(r"\1n ", text)
    return _START.sub(lambda m: m.group(0)[:-1] + m.group(1).upper(), text)


def fill(rng: random.Random, template: str, words: dict[str, str] | None = None) -> str:
    out: list[str] = []
    _expand(_parse(template), rng, words or {}, out)
    return "".join(out)


GIRLS = [
    "Lily",
    "Anna",
    "Ella",
    "Nora",
    "Ruby",
    "Mia",
    "Ivy",
    "Clara",
    "Alice",
    "Rosa",
    "Zoe",
    "Maya",
    "Elsa",
    "Daisy",
    "June",
    "Lucy",
    "Kate",
    "Emma",
    "Sara",
    "Nina",
    "Molly",
    "Amy",
    "Lena",
    "Holly",
    "Tara",
    "Grace",
    "Olive",
    "Freya",
    "Maria",
    "Vera",
]
BOYS = [
    "Tom",
    "Ben",
    "Max",
    "Sam",
    "Leo",
    "Finn",
    "Jack",
    "Noah",
    "Hugo",
    "Theo",
    "Eli",
    "Luca",
    "Felix",
    "Oliver",
    "Arthur",
    "Peter",
    "Will",
    "Henry",
    "Adam",
    "Paul",
    "Toby",
    "Jake",
    "Owen",
    "Milo",
    "Ravi",
    "Carl",
    "Simon",
    "Anton",
    "Emil",
    "George",
]
ANIMALS = [
    "fox",
    "rabbit",
    "bear",
    "mouse",
    "owl",
    "hedgehog",
    "squirrel",
    "duck",
    "cat",
    "dog",
    "frog",
    "goat",
    "badger",
    "otter",
    "pony",
    "lamb",
    "goose",
    "crow",
    "turtle",
    "beaver",
    "mole",
    "deer",
    "pig",
    "hen",
    "donkey",
    "dragon",
    "robot",
    "wolf",
    "sparrow",
    "kitten",
    "puppy",
    "elephant",
]
FEMALE_NAMES = [
    "Bramble",
    "Fern",
    "Poppy",
    "Nutmeg",
    "Hazel",
    "Willow",
    "Tansy",
    "Maple",
    "Juniper",
    "Sorrel",
    "Clementine",
    "Ginger",
    "Berry",
    "Tilly",
    "Bella",
    "Plum",
    "Rosie",
    "Bonnie",
]
MALE_NAMES = [
    "Rusty",
    "Biscuit",
    "Marlow",
    "Bristle",
    "Muffin",
    "Acorn",
    "Dusty",
    "Pebble",
    "Tumble",
    "Socks",
    "Oakley",
    "Puddle",
    "Teasel",
    "Moss",
    "Sunny",
    "Finch",
    "Quill",
    "Bruno",
]
TRAITS = [
    "brave",
    "curious",
    "kind",
    "clever",
    "shy",
    "cheerful",
    "careful",
    "stubborn",
    "quiet",
    "patient",
    "playful",
    "proud",
    "gentle",
    "dreamy",
    "lively",
    "honest",
    "hungry",
    "sleepy",
    "friendly",
    "thoughtful",
]
SIZES = ("little", "small", "young", "tiny", "")
SETTINGS = (
    "in a small village by the sea",
    "in a house at the edge of the forest",
    "at the foot of a high mountain",
    "in a quiet valley",
    "near a wide river",
    "on a green hill",
    "in a cosy cottage",
    "in a little town with crooked streets",
    "beside a deep blue lake",
    "on a farm with a red barn",
    "in the middle of a great wood",
    "on a small island",
    "in a valley full of apple trees",
    "not far from an old stone bridge",
)
SPOTS = (
    "the forest",
    "the river",
    "the old mill",
    "the meadow",
    "the hill",
    "the market",
    "the orchard",
    "the pond",
    "the barn",
    "the garden",
    "the beach",
    "the bridge",
    "the tall oak tree",
    "the well",
    "the stone wall",
    "the cave",
    "the lake",
    "the field",
)
COLOURS = ["red", "blue", "green", "yellow", "purple", "orange", "white", "silver", "golden", "brown", "pink", "striped"]
SEASONS = ("spring", "summer", "autumn", "winter")
FOODS = (
    "an apple",
    "a warm bun",
    "a piece of cheese",
    "a slice of cake",
    "a bowl of soup",
    "a handful of berries",
    "a honey cake",
    "a pear",
    "a loaf of bread",
    "a jam sandwich",
    "a bag of nuts",
    "a pancake",
)
TREATS = (
    "warm milk and honey cakes",
    "hot soup and fresh bread",
    "apple pie",
    "pancakes with jam",
    "sweet tea and biscuits",
    "berry cake",
    "hot chocolate",
    "roasted nuts",
    "plum dumplings",
    "a big pot of stew",
)
ELDERS = (
    ("Grandmother", 1),
    ("Grandfather", 0),
    ("Mother", 1),
    ("Father", 0),
    ("Aunt May", 1),
    ("Uncle Fred", 0),
    ("the old owl", 1),
    ("the wise tortoise", 0),
    ("the old gardener", 0),
    ("the baker", 0),
    ("the teacher", 1),
    ("the old sailor", 0),
)
WEATHERS = (
    "The sun was shining",
    "The sky was blue",
    "A soft wind was blowing",
    "The morning was cool and clear",
    "The birds were singing",
    "The air smelled of flowers",
    "Small white clouds drifted across the sky",
    "The grass was still wet with dew",
)

SUBJECTS = (
    "lost",
    "help",
    "contest",
    "journey",
    "storm",
    "share",
    "learn",
    "mystery",
    "make",
    "fear",
    "newcomer",
    "honest",
    "wish",
    "seed",
    "quarrel",
    "star",
)


class Story:
    """The words of one story and the sentences told so far."""

    def __init__(self, rng: random.Random, kind: str | None = None, name: str | None = None) -> None:
        self.rng = rng
        self.words: dict[str, str] = {}
        self.paragraphs: list[list[str]] = [[]]
        self.kind = self._person("h", kind, name, ())
        same_sort = self.kind in ("girl", "boy")
        friend_kind = rng.choice(("girl", "boy")) if same_sort and rng.random() < 0.75 else None
        self._person("f", friend_kind, None, (self.words["h"], self.kind))
        elder, she = rng.choice(ELDERS)
        self.words.update(
            e=elder, E=elder[0].upper() + elder[1:], ehe="she" if she else "he", ehim="her" if she else "him", ehis="her" if she else "his"
        )
        spots = rng.sample(SPOTS, 3)
        self.words.update(
            pl=spots[0],
            pl2=spots[1],
            pl3=spots[2],
            setting=rng.choice(SETTINGS),
            season=rng.choice(SEASONS),
            colour=rng.choice(COLOURS),
            food=rng.choice(FOODS),
            treat=rng.choice(TREATS),
            weather=rng.choice(WEATHERS),
        )
        self.summary = ""
        self.title = ""
        self.moral = ""

    def _person(self, key: str, kind: str | None, name: str | None, avoid: tuple[str, ...]) -> str:
        rng, w = self.rng, self.words
        if kind is None:
            kind = rng.choice(("girl", "boy")) if rng.random() < 0.5 else rng.choice([a for a in ANIMALS if a not in avoid])
        if name is not None:
            she = name in GIRLS or name in FEMALE_NAMES
        else:
            she = kind == "girl" or (kind != "boy" and rng.random() < 0.5)
            pool = GIRLS if kind == "girl" else BOYS if kind == "boy" else FEMALE_NAMES if she else MALE_NAMES
            name = rng.choice([n for n in pool if n not in avoid])
        trait, size = rng.choice(TRAITS), rng.choice(SIZES)
        w.update(
            {
                key: name,
                key + "k": kind,
                key + "d": f"{size} {kind}".strip(),
                key + "t": trait,
                key + "he": "she" if she else "he",
                key + "him": "her" if she else "him",
                key + "his": "her" if she else "his",
                key + "self": "herself" if she else "himself",
            }
        )
        return kind

    def set(self, **words: str) -> None:
        self.words.update(words)

    def say(self, *forms: str) -> None:
        self.paragraphs[-1].append(fill(self.rng, self.rng.choice(forms), self.words))

    def maybe(self, *forms: str, p: float = 0.5) -> None:
        if self.rng.random() < p:
            self.say(*forms)

    def para(self, p: float = 1.0) -> None:
        if self.paragraphs[-1] and self.rng.random() < p:
            self.paragraphs.append([])

    def text(self) -> str:
        return "\n\n".join(tidy(" ".join(p)) for p in self.paragraphs if p)

    # -- beats that several shapes share --

    def opening(self) -> None:
        self.say(
            "Once upon a time, there was a {ht} {hd} [called|named] {h}. {hhe} lived {setting}[ with {hhis} family||].",
            "Once upon a time, there lived a {hd} [called|named] {h} {setting}.",
            "Once upon a time, {setting}, there lived a {ht} {hd} whose name was {h}.",
            "Once upon a time, a {ht} {hd} [called|named] {h} lived {setting}.",
            "There was once a {hd} [called|named] {h}, who lived {setting}.",
            "{h} was a {ht} {hd} who lived {setting}.",
            "Long ago, {setting}, there lived a {hd} [called|named] {h}.",
            "In a [land|place] far away, there was a {ht} {hd} [called|named] {h}. {hhe} lived {setting}.",
            "One day in {season}, a {ht} {hd} [called|named] {h} [woke up early|set out for a walk|went outside]. {hhe} lived {setting}.",
            "This is the story of {h}, a {ht} {hd} who lived {setting}.",
        )
        self.maybe(
            "Everybody [knew|said] that {h} was [very|a little|rather] {ht}.",
            "{hhe} liked [to sing|to sit in the sun|to watch the clouds|to explore|to listen to stories|to play outside] [more than "
            "anything|very much|every day].",
            "{hhis} best friend was a {fd} [called|named] {f}.",
            "{h} had a [small|warm|tidy] [room|bed|corner] with a [round|little] window, and from it {hhe} could see {pl}.",
            "Every morning {hhe} [ran|walked|went] to {pl} to see what was new.",
            "{h} [was never in a hurry|loved every kind of weather|always had a question|had a song for every day].",
            p=0.6,
        )

    def morning(self) -> None:
        self.say(
            "One [morning|day|sunny morning|{season} morning|afternoon],",
            "One day in {season},",
            "One {season} day,",
            "Then, one [morning|day],",
        )

    def thanks(self) -> None:
        self.say(
            '"Thank you, {h}!" said {f}. "You are a [true|good|real|wonderful] friend."',
            '{f} [smiled|laughed with joy|beamed]. "Thank you so much," {fhe} said.',
            '"I will never forget this," said {f}, and {fhe} [hugged {hhim}|gave {hhim} a big smile|took {hhim} by the arm].',
            '"How can I ever thank you?" asked {f}. "You do not have to," said {h}. "That is what friends are for."',
        )

    def closing(self) -> None:
        self.para(0.6)
        self.maybe(
            "That evening, they [sat by the fire|sat together at the table|watched the sun go down] and [ate|shared] {treat}.",
            "When {hhe} came home, {e} had made {treat}.",
            "On the way home, the [first stars came out|moon rose over {pl}|sky turned pink and gold].",
            "They talked and laughed until it was time for bed.",
            p=0.55,
        )
        if self.moral:
            self.maybe(
                "{h} had learned that {moral}.",
                "From that day on, {h} knew that {moral}.",
                '"Now I know that {moral}," {h} [said|thought] [happily|with a smile|to {hself}].',
                "And {hhe} never forgot that {moral}.",
                p=0.7,
            )
        self.say(
            "And they lived happily ever after.",
            "That night, {h} slept very well.",
            "{h} went to bed [tired and happy|with a smile on {hhis} face].",
            "And if you go there today, you may still see {hhim} [smiling|laughing|playing by {pl}].",
            "It had been [a very good day|the best day of the {season}].",
            "From then on, {h} and {f} were [the best of friends|always together|even better friends].",
            "The end.",
            "{h} was [happy|very happy|proud and happy], and so was {f}.",
            "And that is the end of the story.",
        )


OBJECTS = (
    "kite",
    "scarf",
    "ball",
    "bell",
    "hat",
    "book",
    "button",
    "lantern",
    "boat",
    "key",
    "basket",
    "drum",
    "whistle",
    "ribbon",
    "umbrella",
    "blanket",
    "ring",
    "cup",
    "mitten",
    "toy horse",
)
HIDING = (
    "under a pile of leaves",
    "behind the [big|old] rocks",
    "in the tall grass",
    "high up in a tree",
    "beside the path",
    "under {hhis} own bed",
    "in the hollow of an old tree",
    "in a nest of straw",
    "at the bottom of a basket",
    "behind the garden gate",
    "inside an old boot",
)


def lost(s: Story) -> None:
    rng = s.rng
    obj = rng.choice(OBJECTS)
    s.set(
        obj=f"{rng.choice(COLOURS)} {obj}",
        o=obj,
        hide=rng.choice(HIDING),
        moral=rng.choice(
            (
                "a good friend is worth more than any treasure",
                "it pays to look carefully",
                "it is good to ask for help",
                "one should never give up too soon",
                "things are often closer than we think",
            )
        ),
    )
    s.set(hide=fill(rng, s.words["hide"], s.words))
    s.moral = "{moral}"
    s.say(
        "{h} had a {obj} that {hhe} [loved|liked] [very much|more than anything else|with all {hhis} heart].",
        "Of all the things {hhe} had, {h} loved {hhis} {obj} best.",
        "{hhis} greatest treasure was a {obj}.",
        "For {hhis} birthday, {e} had given {hhim} a {obj}, and {h} took it everywhere.",
    )
    s.para(0.6)
    s.morning()
    s.say(
        "{h} [could not find the {o}|saw that the {o} was gone|looked for {hhis} {o}, but it was gone].",
        "the {o} was [gone|not in its place|nowhere to be seen]. {h} was [very sad|worried|close to tears].",
    )
    s.maybe(
        '"Oh no! Where is my {o}?" [cried|asked|said] {h}.',
        '"It was here yesterday," {hhe} [said|thought].',
        "{hhe} [felt a lump in {hhis} throat|did not know what to do|began to cry].",
        p=0.7,
    )
    s.say(
        "First {hhe} looked [near|by] {pl}, but it was not there. Then {hhe} looked [near|by] {pl2}, but it was not there either.",
        "{hhe} looked [near|by] {pl}. Nothing. {hhe} looked [near|by] {pl2}. Nothing again.",
        "{hhe} looked under the bed, behind the door and even in the [soup pot|flower pots|woodpile], but {hhe} found only [dust|a "
        "sleepy spider|an old sock].",
        "{hhe} searched all morning, from {pl} to {pl2}, without any luck.",
    )
    s.para(0.6)
    s.say(
        'Then {hhe} met {f}, a {ft} {fd}. "Why are you so sad?" asked {f}. "I have lost my {obj}," said {h}.',
        '{f}, the {fd} next door, saw {hhim}. "What is wrong?" {fhe} asked. "My {o} is gone," said {h}.',
        "At last {hhe} went to {f}, {hhis} friend, and told {fhim} everything.",
    )
    s.say(
        '"Do not worry," said {f}. "We will look for it together."',
        '"Let us think," said {f}. "Where did you last have it?"',
        '"Two can see more than one," said {f}. "Come with me!"',
        '"I will help you," {f} said at once.',
    )
    s.maybe(
        '{h} thought hard. "I played near {pl3} yesterday," {hhe} said. So they went there.',
        "So they went to {pl3} together.",
        "They walked and walked until they came to {pl3}.",
        p=0.8,
    )
    s.say(
        "And there, {hide}, was the {obj}!",
        "They looked everywhere, and at last {f} saw something {colour2}. It was the {o}, {hide}!",
        'Suddenly {f} stopped. "Look!" {fhe} cried. The {obj} was {hide}.',
        "It was {h} who saw it first: the {o} lay {hide}.",
    )
    s.maybe(
        "A [mouse|bird|squirrel|mole] had [carried|taken] it there to make a [bed|nest|home] for its little ones.",
        "The wind had blown it there.",
        "{h} had put it there {hself} and forgotten about it.",
        p=0.45,
    )
    s.say("{h} [jumped for joy|was so happy that {hhe} danced|laughed and hugged {f}].", "{h} held the {o} [tight|close] and smiled.")
    s.maybe(
        '"Thank you, {f}," {hhe} said. "Without you I would never have found it."',
        '"You are the best friend in the world," {hhe} said to {f}.',
        p=0.7,
    )
    s.title, s.summary = "The Lost " + obj.title(), "{h} lost {hhis} {obj} and found it again with the help of {f}."


# trouble, what is done about it, how it ends
TROUBLES = (
    (
        "{f} had [hurt {fhis} leg|twisted {fhis} foot] and could not walk",
        "{h} made a [stick|crutch] from a branch and [led|helped] {fhim} home, step by step",
        "After a week {f} could [run|walk] again",
    ),
    (
        "{fhis} roof had a hole, and the rain came in",
        "they carried straw and planks to the house and mended the roof together",
        "When the next rain came, not a drop fell inside",
    ),
    (
        "{f} was stuck in the mud and could not get out",
        "{h} found a long rope, tied it to a tree, and pulled with all {hhis} strength",
        "With a loud plop, {f} came free",
    ),
    (
        "{f} had to carry a heavy sack to {pl} and was too tired to go on",
        "{h} fetched a little cart, and together they pushed it up the path",
        "They reached {pl} just before sunset",
    ),
    (
        "{f} had a cold and could not stop sneezing",
        "{h} cooked a pot of soup, made hot tea, and sat by {fhis} bed",
        "After three days {f} was well again",
    ),
    (
        "{f} had lost the way and did not know how to get home",
        "{h} climbed up high, looked around, and saw the smoke of a chimney",
        "They followed the smoke, and soon {f} was home",
    ),
    (
        "the wind had blown down the fence of {fhis} garden, and the vegetables were in danger",
        "they picked up the planks and set them up again, one by one",
        "By evening the fence stood stronger than before",
    ),
    (
        "{f} could not sleep, because {fhe} was [lonely|all alone]",
        "{h} brought a blanket and a book, and read to {fhim} by the light of a candle",
        "Before the last page, {f} was fast asleep",
    ),
    (
        "{fhis} boat had a leak and was full of water",
        "{h} found some wax and a piece of cloth, and they closed the hole",
        "The boat floated as well as ever",
    ),
    (
        "{f} had dropped all {fhis} apples on the road",
        "{h} ran after every apple and put them back in the basket",
        "Not one apple was missing",
    ),
    (
        "{f} had no wood left, and the house was cold",
        "{h} took {hhis} sledge and brought wood from the forest",
        "Soon a warm fire was burning",
    ),
)


def help_friend(s: Story) -> None:
    trouble, deed, end = s.rng.choice(TROUBLES)
    s.set(
        trouble=fill(s.rng, trouble, s.words),
        deed=fill(s.rng, deed, s.words),
        end=fill(s.rng, end, s.words),
        moral=s.rng.choice(
            (
                "helping others makes the heart warm",
                "a small help can be a great gift",
                "friends help each other",
                "kindness always comes back",
                "even someone small can be a big help",
            )
        ),
    )
    s.moral = "{moral}"
    s.morning()
    s.say(
        "{h} was on the way to {pl2} when {hhe} heard a [voice|cry|sad voice]. It was {f}, a {ft} {fd}.",
        "{h} met {f}, a {ft} {fd}, [near|by] {pl2}. {fhe} looked [very sad|worried|unhappy].",
        "{h} went to visit {hhis} friend {f}, a {fd} who lived near {pl2}. But something was wrong.",
    )
    s.say('"What is the matter?" asked {h}.', '"Why do you look so sad?" {h} asked.', '"Can I help you?" asked {h}.')
    s.say("{f} sighed. {trouble}.", "Then {h} saw it: {trouble}.", "{f} told {hhim} everything: {trouble}.")
    s.maybe(
        '"I do not know what to do," said {f}.',
        '"Nobody has time for me," said {f} in a small voice.',
        "A tear ran down {fhis} face.",
        p=0.5,
    )
    s.para(0.5)
    s.say(
        '{h} did not think twice. "I will help you," {hhe} said.',
        '"Do not be sad," said {h}. "I have an idea."',
        "{h} thought for a moment. Then {hhe} had an idea.",
        "{h} wanted to go and play, but {hhe} could not leave {f} alone.",
    )
    s.say("So {deed}.", "Right away, {deed}.", "Then {deed}.")
    s.maybe(
        "It was hard work, but {hhe} did not [stop|give up].",
        "It took a long time.",
        "{hhe} sang a song while {hhe} worked, and that made it easier.",
        p=0.6,
    )
    s.say("{end}.")
    s.thanks()
    s.maybe(
        "The next day, {f} brought {h} {food}, because {fhe} wanted to say thank you.",
        "A few weeks later, when {h} needed help, {f} was the first to come.",
        p=0.5,
    )
    s.title, s.summary = "A Friend in Need", "{h} helped {f}: {deed}."


CONTESTS = (
    ("a great race", "run", "ran every morning, up the hill and down again", "the first to reach {pl}"),
    ("a baking contest", "bake", "baked one cake after another until the kitchen was full", "whoever made the best cake"),
    ("a singing contest", "sing", "sang from morning to night, even in the bath", "whoever sang the sweetest song"),
    ("a swimming race", "swim", "swam across the lake and back every day", "the first to reach the other shore"),
    ("a kite contest", "fly a kite", "built a kite out of paper and string and tried it in the wind", "whoever flew a kite the highest"),
    ("a drawing contest", "draw", "drew everything that could be seen from the window", "whoever made the finest picture"),
    ("a boat race", "row", "rowed up and down the river until both arms were sore", "the first boat to pass the bridge"),
    (
        "a riddle contest",
        "solve riddles",
        "asked everybody for riddles and thought about them all night",
        "whoever solved the most riddles",
    ),
)


def contest(s: Story) -> None:
    what, verb, practice, who = s.rng.choice(CONTESTS)
    s.set(
        what=what,
        verb=verb,
        practice=practice,
        who=fill(s.rng, who, s.words),
        prize=s.rng.choice(("a golden cup", "a big basket of apples", "a new drum", "a silver bell", "a chocolate cake", "a blue ribbon")),
    )
    win = s.rng.random() < 0.5
    s.say(
        "Every {season} there was {what} near {pl2}, and the prize was {prize}.",
        'One day, a [letter|sign] on the [gate|old tree] said: "Tomorrow week there will be {what}! The prize is {prize}."',
        "In {season}, everybody talked about {what}. The winner would get {prize}.",
    )
    s.say(
        "{h} [wanted to win|wished to take part|dreamed of winning], [but|although] {hhe} had never won anything before.",
        '"I want to take part," said {h}.',
        "{h} loved to {verb}, so {hhe} put {hhis} name on the list.",
    )
    s.maybe(
        '"You? You are much too [small|slow|young]," [laughed|said] {f}, a {ft} {fd}.',
        '{f}, a {ft} {fd}, wanted to win too. "I am the best," said {f}.',
        p=0.55,
    )
    s.say("{h} {practice}.", "So, day after day, {h} {practice}.")
    s.maybe(
        '{E} watched and said, "[Practice makes perfect|Step by step one gets far|Do your best, and that is enough]."',
        "Some days it went well, and some days it went badly, but {hhe} did not stop.",
        p=0.6,
    )
    s.para(0.7)
    s.say(
        "At last the [great|big] day came. Everybody came to watch.",
        "Then the day of the contest came. {weather}, and {h} was very [nervous|excited].",
    )
    if win:
        s.set(moral="[practice makes perfect|it is good to try|hard work is never lost]")
        s.say(
            "{h} took a deep breath and began. {hhe} [thought only of what {hhe} had learned|did everything just as {hhe} had practised|"
            "gave all that {hhe} had]."
        )
        s.say(
            "When it was over, there was a great cheer. {h} had won {prize}!",
            "In the end, the judge called out the name of the winner: {h}! {hhe} could hardly believe it.",
        )
        s.say(
            '{f} came and shook {hhis} hand. "Well done," {fhe} said. "You were the best today."',
            "{h} shared the joy with everybody, most of all with {f}.",
            '"I was wrong about you," said {f}. "Well done!"',
        )
        s.summary = "{h} practised hard and won {what}."
    else:
        s.set(moral="[being kind is better than winning|a friend is better than a prize|winning is not everything]")
        s.say(
            "{h} was doing very well. But then {hhe} saw that {f} [had fallen|was in trouble|was crying].",
            "In the middle of it, {hhe} heard a cry. {f} had fallen and could not get up.",
        )
        s.say(
            "{h} [stopped|turned back|forgot all about the prize] and [helped|ran to help] {fhim}. Somebody else won {prize}.",
            "{h} could go on and win, or {hhe} could help. {hhe} went to help. So another took {prize} home.",
        )
        s.say(
            '"You could have won," said {f}. "Yes," said {h}, "but then you would have been alone."',
            "But everybody cheered for {h}, because {hhe} had been so kind.",
            '"That was the kindest thing I ever saw," said {e}.',
        )
        s.summary = "{h} gave up winning {what} in order to help {f}."
    s.moral = "{moral}"
    s.title = "The " + what.split(" ", 1)[1].title()


GOALS = (
    ("a blue flower that could heal every cold", "{E} was ill, and only this flower could help"),
    ("a jar of honey", "{E} wanted to bake a cake for the feast"),
    ("the white stone of the mountain", "it was said to bring good luck to the whole village"),
    ("fresh water from the high spring", "the well at home was dry"),
    ("the golden feather", "it would make the sick bird well again"),
    ("a letter from the king", "{E} had been waiting for it for a long time"),
    ("a bag of seeds", "the fields at home were empty"),
    ("the oldest song in the world", "nobody at home could remember it any more"),
)
OBSTACLES = (
    ("a wide river without a bridge", "{hhe} built a raft out of branches and crossed the water"),
    ("a big dog that would not let {hhim} pass", "{hhe} gave the dog {food}, and the dog wagged its tail"),
    ("a forest so dark that {hhe} could see nothing", "{hhe} followed the little lights of the fireflies"),
    ("a steep wall of rock", "{hhe} climbed up slowly, one stone after another"),
    ("a gate with a riddle on it", "{hhe} thought about the riddle for a long time, and then the gate opened"),
    ("a bridge with a broken plank", "{hhe} held on to the rope and took one careful step after the other"),
    ("a troll who wanted to know a joke", "{hhe} told the best joke {hhe} knew, and the troll laughed until {hhe2} cried"),
    ("a field of thorns", "{hhe} found a small path that the rabbits used"),
    ("a thick fog", "{hhe} sat down and waited until the wind blew it away"),
    ("three roads that all looked the same", "{hhe} asked a crow, and the crow showed {hhim} the right one"),
)


def journey(s: Story) -> None:
    goal, why = s.rng.choice(GOALS)
    first, second = s.rng.sample(OBSTACLES, 2)
    s.set(
        hhe2="he",
        goal=goal,
        why=fill(s.rng, why, s.words),
        moral="[every long road begins with one step|one can be small and still do great things|"
        "courage grows on the way|it is best not to walk alone]",
    )
    s.set(
        o1=fill(s.rng, first[0], s.words),
        a1=fill(s.rng, first[1], s.words),
        o2=fill(s.rng, second[0], s.words),
        a2=fill(s.rng, second[1], s.words),
    )
    s.moral = "{moral}"
    s.morning()
    s.say(
        "{h} set out to find {goal}, because {why}.",
        '{e} said to {hhim}, "We need {goal}. Will you go and bring it to us?" {h} said yes at once.',
        "{h} heard about {goal}. {hhe} wanted to find it, because {why}.",
    )
    s.say(
        "{hhe} packed {food} and a [warm coat|bottle of water|little lamp] and [said goodbye|went on {hhis} way].",
        '{E} gave {hhim} {food} for the way. "Be careful," {ehe} said.',
        "{hhe} took a stick, a hat and {food}, and off {hhe} went.",
    )
    s.maybe(
        "{f}, a {ft} {fd}, came with {hhim}, because two are better than one.",
        'On the way {hhe} met {f}, a {ft} {fd}. "May I come with you?" asked {f}. "Of course," said {h}.',
        p=0.6,
    )
    s.para(0.6)
    s.say(
        "First {hhe} came to {o1}. But {h} was {ht2}: {a1}.",
        "After an hour {hhe} came to {o1}. What now? In the end, {a1}.",
        "The way was long. Soon there was {o1}. {h} did not turn back. {a1}.",
    )
    s.say(
        "Then there was {o2}. {h} [sat down and thought|took a deep breath|scratched {hhis} head]. Then {a2}.",
        "On the second day {hhe} came to {o2}. This was even harder, but {a2}.",
        'A little later {hhe} stood before {o2}. "I have come so far," said {h}, "I will not give up now." And {a2}.',
    )
    s.maybe(
        "{hhe} was tired, and {hhis} feet hurt, but {hhe} went on.", "At night {hhe} slept under a tree and looked at the stars.", p=0.5
    )
    s.para(0.6)
    s.say(
        "At last, on top of a hill, {hhe} found {goal}.",
        "And there it was at last: {goal}! {h} [laughed out loud|could hardly believe it|danced with joy].",
        "On the third day {hhe} reached the end of the road, and there {hhe} found {goal}.",
    )
    s.say(
        "{hhe} carried it home [as carefully as {hhe} could|with great care], and everybody [cheered|was glad|came out to meet {hhim}].",
        "The way home seemed much shorter. {E} was waiting at the door and took {hhim} in {ehis} arms.",
        "When {hhe} came home, {e} was so happy that {ehe} [laughed|cried|sang].",
    )
    s.title, s.summary = "The Long Way", "{h} went on a long journey and brought home {goal}."


def storm(s: Story) -> None:
    w = s.rng.choice(
        (
            ("a great storm", "The wind howled, and the trees bent down to the ground", "the storm was over"),
            ("heavy snow", "The snow fell so thick that nobody could see the path", "the snow stopped falling"),
            ("a terrible rain", "The rain fell in buckets, and the river grew and grew", "the rain stopped"),
            ("thunder and lightning", "The sky was black, and the thunder rolled over the hills", "the thunder went away"),
            ("a thick grey fog", "Nobody could see farther than the tip of {hhis} own nose", "the fog was gone"),
        )
    )
    s.set(
        storm=w[0],
        how=fill(s.rng, w[1], s.words),
        over=w[2],
        shelter=s.rng.choice(("a hollow tree", "an old barn", "a dry cave", "a little hut", "the old mill", "a boat turned upside down")),
        moral="[after every storm the sun comes back|it is easier to be brave together|"
        "there is always room for one more|a warm place is best when it is shared]",
    )
    s.moral = "{moral}"
    s.morning()
    s.say(
        "{h} was [playing|walking|picking berries] near {pl} when [the sky grew dark|the wind began to blow|the first clouds came].",
        "{h} and {hhis} friend {f}, a {fd}, were far from home when the sky grew dark.",
    )
    s.say("Then came {storm}. {how}.", "Soon there was {storm}. {how}.")
    s.say(
        '"I must find a [dry|safe] place," {h} said.',
        "{h} [ran as fast as {hhe} could|pulled {hhis} hat over {hhis} ears|was afraid, but {hhe} kept going].",
    )
    s.say("At last {hhe} found {shelter} and [crept|went|slipped] inside.", "Near {pl2} {hhe} saw {shelter} and ran inside.")
    s.para(0.5)
    s.say("It was dark in there. But somebody was there already: {f2}!", "Somebody was already sitting there. It was {f2}.")
    s.say(
        '"Come in, there is room for two," {f} said.',
        '"Are you afraid too?" asked {f}. "A little," said {h}. "But less now."',
        "They moved close together to keep warm.",
        "{h} shared {food} with {fhim}, and they [told each other stories|sang songs|counted the seconds].",
    )
    s.maybe(
        'Then there was a knock. A wet [mouse|hen|hare|bird] stood outside. "Come in, come in," they said.',
        '"My {e2} says that storms are only the sky washing its face," said {f}, and {h} had to laugh.',
        p=0.6,
    )
    s.say(
        "After [an hour|a long while|a whole night], {over}. The sun came out, and everything was [shining|bright and clean|quiet].",
        "At last {over}. A rainbow stood over {pl3}.",
    )
    s.say(
        "{h} and {f} walked home [side by side|together], jumping over the puddles."
        if "snow" not in w[0] and "fog" not in w[0]
        else "{h} and {f} walked home [side by side|together].",
        "They ran home, where {e} was already waiting with {treat}.",
    )
    s.title, s.summary = (
        "The Storm" if w[0] != "heavy snow" else "The Great Snow",
        "{h} found shelter from {storm} in {shelter} and was not alone, because {f} was there.",
    )


def share(s: Story) -> None:
    s.set(
        moral="[what you share tastes twice as good|those who give will never be poor|sharing makes friends|"
        "a full heart is better than a full plate]",
        many=s.rng.choice(("three", "five", "four", "six", "ten")),
        thing=s.rng.choice(("apples", "pears", "honey cakes", "plums", "buns", "pancakes", "carrots", "biscuits")),
    )
    s.moral = "{moral}"
    s.morning()
    s.say(
        "{h} [got|was given] {many} {thing} from {e}. They smelled wonderful.",
        "{h} had {many} {thing} in {hhis} basket and was looking for a nice place to eat them.",
        '{E} gave {h} {many} {thing}. "They are all for you," {ehe} said.',
    )
    s.say(
        "{hhe} sat down near {pl} and was about to take the first bite.",
        '"I will eat them all by myself," thought {h}.',
        "{h} was very hungry and sat down under a tree.",
    )
    s.say(
        "Just then {f}, a {ft} {fd}, came along. {fhe} looked [thin|hungry|tired].",
        "Then {hhe} saw {f}, a {fd}, who had nothing to eat.",
        "A {ft} {fd} [called|named] {f} was watching {hhim} with big eyes.",
    )
    s.say(
        '"I have not eaten since yesterday," said {f}.',
        '"Those {thing} look very good," {f} said softly.',
        "{fhis} stomach rumbled so loudly that {h} could hear it.",
    )
    s.para(0.5)
    s.say(
        "{h} looked at {hhis} {thing}. Then {hhe} looked at {f}. It was not easy, but {hhe} held out half of them.",
        'At first {h} wanted to hide the {thing}. But then {hhe} felt sorry. "Please, take some," {hhe} said.',
        '"Come and sit with me," said {h}. "There is enough for both of us."',
    )
    s.say(
        "They ate together, and {h} found that the {thing} had never tasted so good.",
        "{f} ate and ate, and with every bite {fhe} looked happier.",
        "They sat in the sun, ate the {thing} and told each other funny stories.",
    )
    s.maybe(
        'A week later, {h} was hungry and had nothing at all. Then {f} came with a big basket. "Today I share with you," {fhe} said.',
        'Before {fhe} left, {f} gave {h} a {colour} feather. "It brings luck to those who share," {fhe} said.',
        'The next day {f} showed {h} a bush full of sweet berries. "Only my friends know this place," {fhe} said.',
        p=0.8,
    )
    s.title, s.summary = "The Basket of " + s.words["thing"].title(), "{h} shared {hhis} {thing} with {f}, and they became friends."


SKILLS = (
    ("swim", "{hhe} sank like a stone", "lie still on the water and breathe calmly", "swam all the way across the pond"),
    ("ride a bicycle", "{hhe} fell into the bushes", "look ahead and not at the wheel", "rode all the way to {pl}"),
    ("whistle", "only air came out", "make a small round mouth", "whistled a whole song"),
    ("bake bread", "the bread was as hard as a stone", "let the dough rest for an hour", "took a soft golden loaf out of the oven"),
    ("skate", "{hhe} sat down hard on the ice", "bend the knees and take small steps", "glided over the ice like a swan"),
    ("play the flute", "it sounded like an angry cat", "play slowly, one note at a time", "played a sweet tune for everybody"),
    ("read", "the letters danced before {hhis} eyes", "learn one letter every day", "read a whole story aloud"),
    ("climb trees", "{hhe} slid down again", "always hold on with three limbs", "sat at the very top of the oak"),
    ("tie a knot", "it came undone again", "think of a rabbit running around a tree", "tied a knot that held the boat in the wind"),
    ("juggle", "the balls fell on {hhis} head", "begin with only one ball", "kept three balls in the air"),
    (
        "paint",
        "everything looked like mud",
        "look for a long time before the first stroke",
        "painted a picture of {pl} that everybody admired",
    ),
)


def learn(s: Story) -> None:
    skill, fail, hint, success = s.rng.choice(SKILLS)
    s.set(
        skill=skill,
        fail=fill(s.rng, fail, s.words),
        hint=hint,
        success=fill(s.rng, success, s.words),
        moral="[nobody is born a master|every mistake is a step|it takes time to learn something new|one must never give up]",
    )
    s.moral = "{moral}"
    s.say(
        "More than anything, {h} wanted to learn to {skill}.",
        "All of {hhis} friends could {skill}, but {h} could not.",
        "There was one thing {hhe} wanted to learn: {hhe} wanted to {skill}.",
        'One day {h} saw how {f}, a {fd}, could {skill}. "I want to do that too," {hhe} said.',
    )
    s.say("{hhe} tried it at once, but {fail}.", "The first time {hhe} tried, {fail}.")
    s.say(
        "{hhe} tried again, and again {fail}.",
        "Some of the others laughed. {h} turned red.",
        '"I will never learn it," said {h} [sadly|with a sigh].',
        "{hhe} tried it on Monday, on Tuesday and on Wednesday, and every time {fail}.",
    )
    s.para(0.5)
    s.say(
        '{E} saw it. "I will tell you a secret," {ehe} said. "You must {hint}."',
        '{h} asked {e} for help. "The trick is to {hint}," said {e}.',
        '"When I was young, I could not do it either," said {e}. "Then somebody told me to {hint}."',
    )
    s.say(
        "So {h} practised every day[, in sun and in rain|, before breakfast and after supper|]. Little by little it went better.",
        "{h} did just that. It was not easy, and it took many days.",
        "{hhe} tried it that way. The first day it was a little better. The second day it was better still.",
    )
    s.maybe(
        '{f} came to watch and clapped {fhis} hands. "You are getting better!" {fhe} said.',
        "Once {hhe} wanted to stop, but then {hhe} thought of what {e} had said.",
        p=0.6,
    )
    s.say(
        "And one fine morning, {hhe} did it: {hhe} {success}!",
        "Then the day came when {hhe} {success}. {hhe} was so proud!",
        "After three weeks, {hhe} {success}.",
    )
    s.maybe('"I can do it! I can do it!" {hhe} shouted.', "Everybody clapped and cheered.", '"You see?" said {e}, and {ehe} smiled.', p=0.7)
    s.title, s.summary = s.words["h"] + " Learns to " + skill.title(), "{h} learned to {skill} because {hhe} did not give up."


MYSTERIES = (
    ("every night there was a knocking on the roof", "a branch of the old apple tree that knocked when the wind blew"),
    ("the carrots in the garden were disappearing", "a family of hungry rabbits with seven little ones"),
    ("there were strange footprints in the snow", "{f}, who had put on boots that were much too big"),
    ("somebody was singing in the well", "a little frog who liked the sound of his own voice"),
    ("there was a light in the old mill at midnight", "a painter who could only work when it was quiet"),
    ("the cakes on the window sill were gone every morning", "a crow who had a sweet tooth"),
    ("a small present lay before the door each morning", "{f}, who was too shy to say hello"),
    ("the clock in the tower stopped every day at noon", "two pigeons who liked to sit on the big hand"),
    ("there was a humming sound in the wall", "a swarm of bees that had made honey there"),
    ("the milk jug was empty every morning", "a kitten who had come in through the window"),
)


def mystery(s: Story) -> None:
    odd, cause = s.rng.choice(MYSTERIES)
    s.set(
        odd=fill(s.rng, odd, s.words),
        cause=fill(s.rng, cause, s.words),
        moral="[most riddles have a simple answer|it is better to look than to be afraid|one should ask before one is angry]",
    )
    s.moral = "{moral}"
    s.say(
        "One {season}, something strange began: {odd}.",
        "Then a strange thing happened: {odd}.",
        "One day everybody was talking about it: {odd}.",
    )
    s.say('"It must be a ghost," some people said.', '"Who can that be?" {h} wondered.', "Nobody knew why.", '"It is a mystery," said {e}.')
    s.say("{h} wanted to find out.", '"I will find out," said {h}.', "{h}, who was very curious, made a plan.")
    s.say(
        "{hhe} asked {f}, a {ft} {fd}, [to help|to come along], but {f} only [smiled|shook {fhis} head]."
        if "{f}" in cause
        else "{hhe} asked {f}, a {ft} {fd}, to help, and {f} [was glad to come|said yes|brought a lantern]."
    )
    s.para(0.5)
    s.say(
        "That night {hhe} hid behind [the door|a barrel|the curtain|a bush] and waited. The moon rose. An owl called.",
        "{hhe} sat very still and kept {hhis} eyes open, hour after hour.",
        "First {hhe} looked for traces. Then {hhe} hid and waited.",
    )
    s.maybe("{hhis} heart beat fast.", "It was so quiet that {hhe} could hear a leaf fall.", "{hhe} almost fell asleep.", p=0.6)
    s.say(
        "Then, at last, {hhe} saw what it was. It was {cause}!",
        "Suddenly there was a sound. {h} lit the lamp, and what did {hhe} see? It was {cause}.",
        "And then the mystery was solved. It was {cause}.",
    )
    s.say(
        '{h} had to laugh. "So that is all!" {hhe} said.',
        "{h} laughed and laughed, and in the morning {hhe} told everybody.",
        "How they all laughed when they heard about it!",
    )
    s.title, s.summary = "The Mystery", "{h} found out why {odd}: it was {cause}."


MAKINGS = (
    ("a treehouse", "planks, nails and a long ladder", "a place to sit above the leaves"),
    ("a little boat", "wood, a sheet and some string", "a boat that did not sink"),
    ("a birdhouse", "an old box, a saw and some paint", "a home for a family of blue birds"),
    ("a lantern", "paper, glue and a candle", "a lantern that shone like the moon"),
    ("a scarf", "wool in seven colours", "the longest scarf anybody had ever seen"),
    ("a cake with three layers", "flour, eggs, butter and jam", "a cake as high as a hat"),
    ("a kite", "paper, two sticks and a ball of string", "a kite that flew higher than the birds"),
    ("a snow house", "snow, a bucket and warm gloves", "a round white house with a tiny door"),
    ("a quilt", "old cloth, a needle and thread", "a quilt with a picture of every season"),
    ("a music box", "a tin, a spring and some pins", "a little box that played a tune"),
)


def make(s: Story) -> None:
    what, needs, result = s.rng.choice(MAKINGS)
    s.set(
        what=what,
        needs=needs,
        result=result,
        moral="[a gift made by hand is the best gift|good work needs time|two can do what one cannot|"
        "it is more fun to make things together]",
    )
    s.moral = "{moral}"
    s.say(
        "It was almost {f}'s birthday, and {h} had no present. {f} was a {ft} {fd} and {hhis} best friend.",
        "One [rainy|windy|quiet] day, {h} and {hhis} friend {f}, a {fd}, did not know what to do.",
        "{h} wanted to surprise {f}, a {fd} who lived next door.",
    )
    s.say(
        '"I know! I will make {what}," said {h}.',
        "Then {h} had an idea: {hhe} would make {what}!",
        '"What about {what}?" {h} thought. "I could make that."',
    )
    s.say(
        "For that {hhe} needed {needs}.",
        "{hhe} collected {needs}.",
        "{hhe} asked {e} for {needs}, and {e} [gave {hhim} everything|helped {hhim} to find it all].",
    )
    s.say(
        "It was harder than it looked. The first try [fell apart|went wrong|looked very funny].",
        "At first everything went wrong.",
        "{hhe} worked all day, and {hhis} [hands|paws|fingers] grew tired." if s.kind in ("girl", "boy") else "{hhe} worked all day long.",
    )
    s.say(
        '"Slowly, slowly," said {e}. "Begin again, and take your time."',
        "{h} took a deep breath and began again.",
        "But {h} did not give up. {hhe} tried a second time and was more careful.",
    )
    s.para(0.5)
    s.say(
        "In the evening it was ready: {result}.",
        "After two days it was done. It was {result}!",
        "And when the sun went down, there it was, {result}.",
    )
    s.say(
        '{f} could not believe {fhis} eyes. "Did you make this all by yourself?" {fhe} asked.',
        "{f} was so happy that {fhe} danced around it three times.",
        '"It is the most beautiful thing I have ever seen," said {f}.',
    )
    s.maybe(
        '{h} blushed. "{E} helped me a little," {hhe} said.',
        "They looked at it for a long time.",
        "Everybody came to see it, and {h} was very proud.",
        p=0.6,
    )
    s.title, s.summary = "The Present", "{h} made {what} for {f}, and it was {result}."


FEARS = (
    ("the dark", "the lamp went out", "the stars and the little glow-worms that one can only see in the dark"),
    ("deep water", "{f} fell into the river", "that the water could carry {hhim}"),
    ("high places", "a kitten was stuck at the top of a tall tree", "how beautiful the world looked from above"),
    ("thunder", "{f} had to cross the field in a storm", "that thunder is only a loud noise"),
    ("big dogs", "a big dog stood crying by the road with a thorn in its paw", "that even a big dog can be gentle"),
    ("the old house on the hill", "the ball flew over its wall", "a kind old woman who loved visitors"),
    ("speaking to strangers", "a lost child asked the way", "that strangers can become friends"),
    ("the forest", "{e} had not come home from the forest", "the songs of the birds and the smell of moss"),
)


def fear(s: Story) -> None:
    what, event, found = s.rng.choice(FEARS)
    s.set(
        what=what,
        event=fill(s.rng, event, s.words),
        found=fill(s.rng, found, s.words),
        moral="[being brave means to be afraid and to do it all the same|fear grows smaller when you look at it|courage can be learned]",
    )
    s.moral = "{moral}"
    s.say(
        "There was only one thing that {h} was afraid of: {what}.",
        "But {h} had a secret. {hhe} was afraid of {what}.",
        "{h} was not afraid of [spiders|wolves|ghosts|bees]. But {hhe} was very much afraid of {what}.",
    )
    s.say(
        "When the others laughed about it, {hhe} [looked at the ground|said nothing|went home].",
        '"Everybody is afraid of something," {e} often told {hhim}.',
        "{hhis} friend {f}, a {ft} {fd}, was the only one who knew.",
        "{hhe} did not tell anybody, not even {f}, {hhis} best friend.",
    )
    s.para(0.5)
    s.say("One evening, {event}. Nobody else was near.", "Then, one day, {event}.", "But one {season} day, something happened: {event}.")
    s.say(
        "{h} began to shake. {hhis} [heart|knees] [said no|would not stop trembling], but {hhe} knew that {hhe} had to do something.",
        '"I cannot do it," thought {h}. "But if I do not, who will?"',
        "{h} wanted to run away. But then {hhe} closed {hhis} eyes and counted to three.",
    )
    s.say(
        "{hhe} took one step. Then another. And then one more.",
        "So {hhe} [took a deep breath|made {hself} very tall] and went.",
        '"One, two, three," said {h}, and {hhe} did what had to be done.',
    )
    s.say(
        "And what did {hhe} find? {hhe} found {found}." if not found.startswith(("that", "how")) else "And then {hhe} found out {found}.",
        "It was not bad at all. In the end, {hhe} discovered {found}.",
    )
    s.say("In the end, everything turned out well, and everybody was safe.", "Soon everything was all right again.")
    s.say(
        '"You were so brave!" said {f}.',
        "{E} was very proud of {hhim}.",
        '"Weren\'t you afraid?" asked {f}. "Yes," said {h}, "but I did it anyway."',
    )
    s.title, s.summary = s.words["h"] + " Is Brave", "{h} was afraid of {what}, but was brave when {event}."


def newcomer(s: Story) -> None:
    s.set(
        game=s.rng.choice(("hide and seek", "ball", "tag", "catch", "pirates", "marbles")),
        gift=s.rng.choice(
            (
                "tell wonderful stories",
                "whistle like a bird",
                "build the best dams",
                "draw anything",
                "make everybody laugh",
                "find the sweetest berries",
            )
        ),
        moral="[a stranger is only a friend you do not know yet|it is good to say hello first|everybody is good at something]",
    )
    s.moral = "{moral}"
    s.morning()
    s.say(
        "a new family moved into the empty house near {pl}. They had a {fd} [called|named] {f}.",
        "{h} saw somebody new near {pl}. It was a {ft} {fd}.",
    )
    s.say(
        "{f} was [quiet|shy] and stood alone while the others played {game}.",
        "Nobody spoke to {f}, because {fhe} was new.",
        '"{fhe} looks strange," the others said, and they went on playing {game}.',
    )
    s.say(
        "{h} saw it and felt sorry.",
        "{h} remembered how it feels to be alone.",
        '"I would not like to be alone on my first day," thought {h}.',
    )
    s.say(
        'So {hhe} went over and said, "Hello, I am {h}. What is your name?" "{f}," said the {fd} very softly.',
        '"Hello! Would you like to play {game} with us?" {hhe} asked. {f} looked up. "Me?" {fhe} said. "Yes, you," said {h}.',
    )
    s.para(0.5)
    s.say(
        "At first {f} did not say much. But then it turned out that {fhe} could {gift}.",
        "They played until the sun went down, and {h} learned that {f} could {gift}.",
        "{h} asked many questions, and soon {f} told {hhim} everything. {fhe} could even {gift}!",
    )
    s.say(
        "The others came closer and wanted to see it too.",
        '"Will you show us?" asked the others.',
        "Soon all the others wanted to be friends with {f} as well.",
    )
    s.maybe(
        '"I was so afraid that nobody would like me," said {f}.',
        '"Thank you for coming over," {f} said.',
        '"This is the best day since we came here," said {f}.',
        p=0.8,
    )
    s.title, s.summary = "The New Friend", "{f} was new and alone, but {h} asked {fhim} to play {game}, and they became friends."


def honest(s: Story) -> None:
    s.set(
        thing=s.rng.choice(
            (
                "the blue vase",
                "the big window",
                "the old clock",
                "the milk jug",
                "the flower pot",
                "the best plate",
                "the lamp",
                "the garden gate",
            )
        ),
        how=s.rng.choice(("with the ball", "while running through the house", "with one careless step", "while dancing")),
        moral="[it is best to tell the truth|an honest word makes the heart light|everybody makes mistakes|a mistake can be put right]",
    )
    s.moral = "{moral}"
    s.morning()
    s.say(
        "{h} broke {thing} of {e} {how}. Nobody had seen it.",
        "there was a loud crash. {h} had broken {thing} {how}!",
        "{h} was playing, and before {hhe} knew it, {hhe} had broken {thing} {how}.",
    )
    s.say(
        "{hhe} was very frightened. What would {e} say?",
        "{hhis} heart beat fast. {hhe} hid the pieces under the bed.",
        '"Oh dear," whispered {h}. "What shall I do now?"',
    )
    s.say(
        '"Just say it was the cat," said {f}, a {fd}.'
        if s.kind != "cat" and s.words["fk"] not in ("cat", "kitten")
        else '"Just say it was the wind," said {f}, a {fd}.',
        "{hhe} thought of saying that the wind had done it.",
        "All day long {hhe} could not eat and could not play, because {hhe} thought of {thing}.",
    )
    s.para(0.5)
    s.say(
        'In the evening {hhe} went to {e}. "I must tell you something," {hhe} said. "I broke {thing}. I am sorry."',
        "But {h} did not want to lie. {hhe} went to {e} and told {ehim} everything.",
        'At last {hhe} could bear it no longer. "It was me," {hhe} said to {e}, and a tear ran down {hhis} cheek.',
    )
    s.say(
        '{E} was quiet for a while. Then {ehe} smiled. "It was brave of you to tell me," {ehe} said.',
        '"Thank you for telling the truth," said {e}. "That is worth more than {thing}."',
        "{E} was a little sad, but {ehe} was not angry.",
    )
    s.say(
        "Together they picked up the pieces and mended it with glue.",
        '"Now let us mend it together," said {e}.',
        "The next day {h} worked in the garden to help to pay for a new one.",
    )
    s.say("{h} felt as light as a feather.", "A great stone fell from {hhis} heart.")
    s.title, s.summary = "The Broken Thing", "{h} broke {thing} and told {e} the truth."


def wish(s: Story) -> None:
    s.set(
        giver=s.rng.choice(
            (
                "a golden fish",
                "a tiny fairy",
                "an old man with a long beard",
                "a talking star",
                "a green bottle with a spirit in it",
                "a silver snail",
            )
        ),
        want=s.rng.choice(
            (
                "a mountain of cake",
                "to be as tall as a tree",
                "to be able to fly",
                "a castle with a hundred rooms",
                "never to go to bed again",
                "to be the king of the forest",
            )
        ),
        moral="[the best things cannot be wished for|one should think before one wishes|"
        "home is the best place of all|enough is better than too much]",
    )
    s.moral = "{moral}"
    fish = {
        "a mountain of cake": "after three days of cake, {hhe} felt sick and longed for a simple piece of bread",
        "to be as tall as a tree": "nobody could hear {hhim} any more, and {hhe} did not fit into {hhis} own house",
        "to be able to fly": "the wind carried {hhim} so far that {hhe} could no longer see {hhis} home",
        "a castle with a hundred rooms": "it was so big and so empty that {hhe} felt very lonely",
        "never to go to bed again": "{hhe} grew so tired that {hhe} could not even laugh",
        "to be the king of the forest": "everybody came with questions, and there was no time left to play",
    }
    s.set(trouble=fish[s.words["want"]])
    s.morning()
    s.say(
        "{h} found {giver} near {pl}.",
        "{h} was sitting near {pl} when {giver} appeared.",
        "{h} helped {giver} near {pl}, without knowing who it was.",
    )
    s.say(
        '"You have a good heart, {h}. I will give you [two|three] wishes," said a small voice.',
        '"Because you were kind to me, you may make a wish," it said. "But think well!"',
    )
    s.say(
        "{h} did not think for long. {hhe} wished for {want}."
        if not s.words["want"].startswith(("to ", "never"))
        else "{h} did not think for long. {hhe} wished {want}."
    )
    s.say(
        "And it came true at once! At first it was wonderful. But soon {trouble}.",
        "Puff! It came true. {h} was very happy. But then {trouble}.",
    )
    s.para(0.5)
    s.say(
        '"Oh, I wish that everything were as before," said {h}. And puff, so it was.',
        "So {hhe} used {hhis} last wish to make everything as it had been.",
        '{hhe} went back to {pl}. "Please, take my wish back," {hhe} said.',
    )
    s.say(
        "{hhe} ran home to {e}, ate {food} and was happier than ever.",
        '{f}, {hhis} friend, was waiting at the gate. "Where have you been?" {fhe} asked. "Very far away," said {h}, '
        '"but it is better here."',
    )
    s.title, s.summary = (
        "The Wish",
        "{h} made a foolish wish and was glad when everything was as before.",
    )


def seed(s: Story) -> None:
    s.set(
        plant=s.rng.choice(("sunflower", "pumpkin", "apple tree", "rose bush", "bean", "cherry tree", "strawberry plant", "giant cabbage")),
        moral="[good things take time|patience is a kind of magic|small things can grow big|who cares for the small will enjoy the great]",
    )
    s.moral = "{moral}"
    s.morning()
    s.say('{e} gave {h} a tiny seed. "Look after it well," {ehe} said.', "{h} found a tiny seed near {pl} and took it home.")
    s.say("{h} planted it in the garden and gave it water.", "{hhe} made a hole in the earth, put the seed in and covered it with care.")
    s.say(
        "The next day {hhe} looked, but there was nothing to see. After a week there was still nothing.",
        "{hhe} looked every morning. Nothing. {hhe} looked every evening. Nothing.",
        '"When will it grow?" {hhe} asked every day.',
    )
    s.say(
        '"Nothing will ever grow there," said {f}, a {fd}.',
        '"You must be patient," said {e}.',
        '"Maybe it is asleep," said {f}, a {ft} {fd}.',
    )
    s.say(
        "But {h} went on watering it. {hhe} sang to it, and when it was cold, {hhe} covered it with straw.",
        "{h} did not give up. Every day {hhe} brought water from {pl2}.",
    )
    s.para(0.5)
    s.say(
        "Then, one morning in spring, there was a tiny green leaf!", "And then, after a warm rain, a small green tip came out of the earth."
    )
    s.say(
        "It grew and grew, and by the end of the summer it was a {plant}, the [finest|biggest|most beautiful] anybody had ever seen.",
        "Week after week it grew. It became a {plant}, [taller than {h}|as big as a barrel|so fine that people came from far away to "
        "see it].",
    )
    s.say(
        '"You were right to wait," said {f}.',
        "{h} kept some of the seeds for the next year and gave one to {f}.",
        '{E} looked at it and nodded. "You have taken good care of it," {ehe} said.',
    )
    s.title, s.summary = "The Tiny Seed", "{h} planted a seed and cared for it until it became a {plant}."


def quarrel(s: Story) -> None:
    s.set(
        thing=s.rng.choice(
            (
                "a shiny stone",
                "the last piece of cake",
                "who was faster",
                "a game of cards",
                "an old hat",
                "whose turn it was",
                "the best seat by the fire",
                "a swing",
            )
        ),
        moral="[a friend is worth more than being right|it is not hard to say sorry|friends may quarrel, but they make up again]",
    )
    s.moral = "{moral}"
    s.say(
        "{h} and {f}, a {ft} {fd}, were the best of friends. They did everything together.",
        "{hhis} best friend was {f}, a {ft} {fd}, and they had never had a quarrel.",
    )
    s.say("But one day they quarrelled about {thing}.", "Then, one {season} day, they had a quarrel about {thing}.")
    s.say(
        '"It is not fair!" cried {h}. "You are not fair!" shouted {f}.',
        '"I do not want to see you any more," said {f}, and {fhe} went away.',
        "They shouted at each other, and then both of them went home.",
    )
    s.say(
        "The next day {h} went to {pl} alone, but it was no fun.",
        "For three days they did not speak. {h} sat at the window and was sad.",
        "{h} tried to play alone, but without {f} everything was boring.",
    )
    s.say(
        '"Why do you not go to {fhim}?" asked {e}. "Somebody has to begin."',
        '{e} said, "Two stubborn goats cannot cross one bridge."',
        "{hhe} thought about it all night. Was {thing} really so important?",
    )
    s.para(0.5)
    s.say(
        "So {h} took {food} and went to {f}. On the way {hhe} met {fhim}, because {f} had been coming to say sorry too!",
        '{h} went to the house of {f} and knocked. "I am sorry," {hhe} said. "I am sorry too," said {f}.',
    )
    s.say(
        "They both laughed, and the quarrel was forgotten.",
        "They looked at each other, and then they began to laugh.",
        "They shook hands and shared {food}.",
    )
    s.title, s.summary = "The Quarrel", "{h} and {f} quarrelled about {thing}, but they said sorry and were friends again."


def star(s: Story) -> None:
    s.set(
        thing=s.rng.choice(
            ("a little star", "the moon's youngest daughter", "a small white cloud", "a lost sunbeam", "a snowflake that did not melt")
        ),
        moral="[everyone needs a home|even a small light can be seen from far away|saying goodbye is part of friendship]",
    )
    s.moral = "{moral}"
    s.say(
        "One night {h} could not sleep. {hhe} looked out of the window and saw something shining near {pl}.",
        "One [clear|quiet] night, {h} saw a light fall from the sky. It fell near {pl}.",
    )
    s.say("{hhe} put on {hhis} coat and went out. There, in the grass, lay {thing}.", "{hhe} tiptoed outside. It was {thing}!")
    s.say('"I fell down, and I cannot get back," it said in a thin voice.', '"Please help me," it said. "I want to go home to the sky."')
    s.say(
        '"Do not be afraid," said {h}. "I will take you home."',
        "{h} took it up [very gently|with great care]. It was [cool|warm] and light.",
    )
    s.say(
        "But how do you reach the sky? {h} went to ask {f}, a {ft} {fd} who lived near {pl2}.",
        "{h} woke {f}, {hhis} friend, a {fd}. Together they thought about it.",
    )
    s.para(0.5)
    s.say(
        "First they climbed the highest tree, but the sky was still too far. Then they tied a [kite|balloon] to it, and the wind came.",
        "They climbed up the highest hill. Then {f} had an idea: they would ask the wind.",
        "They built a tower of boxes, but it fell down. Then an old owl offered to carry it up on her wings.",
    )
    s.say(
        "Slowly it rose, higher and higher, until it was a tiny light among all the others.",
        "Up and up it went, until they could see it shining in the sky.",
    )
    s.say('"Goodbye!" called {h}. "Come and see us again!"', "It twinkled three times. That meant thank you.")
    s.say("Since then, every night, {h} looks up and waves.", "And every clear night it shines right above {hhis} house.")
    s.title, s.summary = "The Light in the Grass", "{h} found {thing} and, with the help of {f}, brought it back to the sky."


SHAPES: dict[str, Callable[[Story], None]] = {
    "lost": lost,
    "help": help_friend,
    "contest": contest,
    "journey": journey,
    "storm": storm,
    "share": share,
    "learn": learn,
    "mystery": mystery,
    "make": make,
    "fear": fear,
    "newcomer": newcomer,
    "honest": honest,
    "wish": wish,
    "seed": seed,
    "quarrel": quarrel,
    "star": star,
}
THEMES = {
    "lost": "a lost treasure",
    "help": "helping a friend",
    "contest": "a contest",
    "journey": "a long journey",
    "storm": "a storm",
    "share": "sharing",
    "learn": "learning something new",
    "mystery": "a mystery",
    "make": "making a present",
    "fear": "being brave",
    "newcomer": "a new friend",
    "honest": "telling the truth",
    "wish": "a wish",
    "seed": "a seed",
    "quarrel": "a quarrel",
    "star": "the night sky",
}


def tell(rng: random.Random, shape: str | None = None, kind: str | None = None, name: str | None = None) -> tuple[Story, str]:
    """A story and the shape it has. `kind` and `name` fix its hero."""
    shape = shape or rng.choice(SUBJECTS)
    s = Story(rng, kind, name)
    s.set(
        colour2=s.words["colour"],
        ht2=rng.choice(("clever", "brave", "not afraid", "patient")),
        f2=f"{s.words['f']}, a {s.words['ft']} {s.words['fd']}",
        e2=rng.choice(("grandmother", "uncle", "father", "aunt")),
    )
    s.opening()
    s.para(0.35)
    SHAPES[shape](s)
    s.closing()
    s.summary = tidy(fill(rng, s.summary, s.words))
    return s, shape
