"""Requests for children's stories: sentence forms with blanks, and words to fill them."""

import random

# Forms that state a length get stories with an end. Without one a small model writes until it repeats itself.
FORMS = (
    "Write a short story about {who}.",
    "Write a short story about {who} {where}.",
    "Write a story of five sentences about {who} {where}.",
    "Write a story of five sentences about {who} and {thing}.",
    "Write a story of six sentences in which {who} learns {lesson}.",
    "Write one paragraph: a simple story about {who} who finds {thing}.",
    "Write a simple story in one paragraph: {who} loses {thing} {where}.",
    "Tell a story in five sentences: {who} finds {thing} {where}.",
    "Tell me in one paragraph about {who} who is {feeling} {where}.",
    "In simple words, tell me a tiny story about {who}, {thing} and a friend.",
    "Please write one paragraph for my class about {who} who shares {thing}.",
    "Tell me a bedtime story about {who} {where}.",
)
WHO = (
    *("a fox", "a cat", "a dog", "a bear", "a mouse", "a bird", "a frog", "a king", "a girl", "a boy", "a robot"),
    *("a small fox", "a brave mouse", "a sleepy bear", "a young rabbit", "an old turtle", "a curious kitten"),
    *("a shy hedgehog", "a little owl", "a clever crow", "a kind elephant", "a lonely whale", "a tiny ant"),
    *("a proud rooster", "a hungry goat", "a lost puppy", "a baby penguin", "a quiet deer", "a noisy duck"),
    *("a friendly dragon", "a small robot", "a young wizard", "a paper boat", "a snowman", "a little cloud"),
    *("a girl named Mia", "a boy named Tom", "a girl named Lina", "a boy named Omar", "a girl called Rosa"),
    *("a boy called Finn", "two sisters", "two brothers", "a farmer", "a baker", "a fisherman", "a gardener"),
    *("a grandmother", "a grandfather", "a young sailor", "a new teacher", "a postman", "twin squirrels"),
)
WHERE = (
    *("in the forest", "by the sea", "on a farm", "in a garden", "at the market", "on a hill", "in the snow"),
    *("by the river", "in an old house", "at school", "in the rain", "on a small island", "in a quiet village"),
    *("under a big tree", "at the lake", "in the mountains", "on a train", "in a busy town", "at the zoo"),
    *("in the library", "behind the barn", "on the beach", "in a cave", "at the harbour", "on a windy day"),
    *("in the kitchen", "at the edge of a field", "in the moonlight", "on the way home", "near a bridge"),
)
THING = (
    *("a red ball", "a blue kite", "a wooden box", "a golden key", "a warm scarf", "a shiny stone", "a lantern"),
    *("a big umbrella", "a round cake", "a basket of apples", "a small drum", "a torn map", "a yellow hat"),
    *("an old clock", "a broken chair", "a jar of honey", "a letter", "a little bell", "a pair of boots"),
    *("a toy train", "a bicycle", "a music box", "a rope", "a picture book", "a feather", "a glass marble"),
    *("a wheelbarrow", "a bag of seeds", "a silver spoon", "a pumpkin", "a teapot", "a paper star"),
)
LESSON = (
    *("to share", "to say sorry", "to be patient", "to ask for help", "to tell the truth", "to swim", "to listen"),
    *("to be brave", "that small friends can help", "to wait for spring", "to try again", "to be kind"),
    *("not to be afraid of the dark", "to look after a plant", "that everyone makes mistakes", "to keep a promise"),
)
# Beginnings of stories, for the model to continue: so each story names its subject in its first words.
OPENINGS = (
    *("Once upon a time, {who}", "One day, {who}", "One morning, {who}", "Long ago, {who}"),
    *("This is the story of {who}", "It was a fine day, and {who}"),
)
FEELING = (
    *("afraid of thunder", "too tired to play", "very proud", "looking for a friend", "a little sad", "very hungry"),
    *("late for dinner", "full of questions", "not able to sleep", "all alone", "much too curious", "very excited"),
)


def story_request(rng: random.Random) -> tuple[str, str, list[str]]:
    """A prompt, the opening of its story, and the subjects that this should name: the last word of each blank.

    Forms of prompt and opening are random, and filled with the same random words.
    """
    words = {"who": WHO, "where": WHERE, "thing": THING, "lesson": LESSON, "feeling": FEELING}
    form = rng.choice(FORMS)
    blanks = {name: rng.choice(choices) for name, choices in words.items()}
    subjects = [phrase.split()[-1] for name, phrase in blanks.items() if "{" + name + "}" in form]
    return form.format(**blanks), rng.choice(OPENINGS).format(**blanks), subjects
