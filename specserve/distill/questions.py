"""Questions and tasks as people put them, in parts that are combined: some twenty thousand whole user messages.

A small target's own messages are often nonsense, and what a draft has to foresee are answers to what people ask. None
of them is among the prompts that drafts are measured with.
"""

from __future__ import annotations

import random

_HOW_TO = (
    "boil rice without burning it", "bake a sourdough loaf", "sharpen a kitchen knife", "peel garlic quickly",
    "keep bread fresh", "make cold-brew coffee", "cook dried beans", "store fresh herbs", "freeze strawberries",
    "make jam from plums", "cook a steak medium rare", "make a salad dressing", "tell whether an egg is fresh",
    "clean a burnt pan", "descale a kettle", "get rid of fruit flies", "get a smell out of shoes",
    "remove chewing gum from a coat", "get ink out of a cotton shirt", "wash a wool jumper", "iron a shirt",
    "fold a fitted sheet", "sew on a button", "patch a hole in jeans", "polish leather boots", "clean a mirror",
    "unblock a sink", "stop a tap from dripping", "paint a room", "hang a heavy picture", "fill a crack in a wall",
    "assemble a bookshelf", "lower my heating bill", "find a leak in a roof", "get rid of mould in a bathroom",
    "prune a rose bush", "grow tomatoes on a balcony", "start a compost heap", "keep slugs off lettuce",
    "repot an orchid", "plant a hedge", "mow a lawn evenly", "attract butterflies to my garden",
    "teach a parrot to talk", "introduce a kitten to an old dog", "stop my dog from barking at the postman",
    "clean a fish tank", "bathe a rabbit", "choose a vet", "clip a cat's claws", "walk two dogs at once",
    "lose weight slowly", "do my first push-up", "run five kilometres", "swim faster", "touch my toes",
    "get rid of hiccups", "treat a small burn", "lower my blood pressure", "stop a nosebleed", "cure a sore throat",
    "sit properly at a desk", "stop snoring", "get up earlier", "deal with jet lag", "quit smoking",
    "calm down before a speech", "remember names", "learn a poem by heart", "take better notes", "read faster",
    "concentrate in a noisy office", "stop putting things off", "plan my week", "write a to-do list that works",
    "say sorry to a friend", "make small talk at a party", "end a phone call politely", "write a wedding toast",
    "tell my landlord that the heating is off", "return a broken toaster", "cancel a gym membership",
    "ask a stranger for directions", "complain about a late parcel", "decline an invitation", "negotiate a salary",
    "resign from my job", "write a letter of recommendation", "introduce myself in a meeting", "lead my first team",
    "give honest feedback", "run a short meeting", "find a mentor", "change careers at forty", "open a bank account",
    "pay off a credit card", "start investing with little money", "make a household budget", "split a bill fairly",
    "save for a house", "file my taxes on time", "spot a scam e-mail", "choose a pension", "pack a small suitcase",
    "find cheap flights", "pick a hotel", "travel with a baby", "avoid sea sickness", "drive on the left",
    "read a train timetable", "learn a few words of Italian before a trip", "camp in the rain",
    "light a fire without matches", "read a compass", "tie a bowline", "find north by the stars", "pitch a tent",
    "paddle a canoe", "skip a stone", "ride a bicycle in traffic", "mend a bicycle chain", "change the oil in a car",
    "jump-start a car", "park in a narrow space", "check tyre pressure", "wash a car by hand",
    "take a good portrait photo", "photograph the night sky", "draw a face", "mix the colour brown",
    "hold a violin bow", "tune a guitar", "read sheet music", "sing higher notes", "write a melody", "juggle",
    "solve a Rubik's cube", "win at noughts and crosses", "play poker", "open a chess game", "shuffle cards",
    "fold a paper crane", "knit a scarf", "make a candle", "build a birdhouse", "make a kite", "carve a pumpkin",
    "back up my phone", "choose a strong password", "speed up an old laptop", "free space on a phone",
    "take a screenshot", "set up a home printer", "share a large file", "stop spam", "make a simple website",
    "learn to touch-type", "use a spreadsheet for a budget", "convert a PDF to text", "install Linux",
    "explain death to a small child", "help a child who is afraid of the dark", "get a toddler to eat vegetables",
    "help my son with fractions", "talk to a teenager", "choose a school", "organise a class reunion",
    "write a short story", "begin a diary", "find a subject for an essay", "cite a source", "learn vocabulary",
    "multiply two-digit numbers in my head", "find the area of a triangle", "calculate a percentage",
    "add two fractions", "solve a quadratic equation", "find the average of a list", "convert miles to kilometres",
    "balance a chemical equation", "build a simple circuit", "grow crystals at home", "see a comet",
)  # fmt: skip
_PAIRS = (
    "a crocodile and an alligator", "a comet and a meteor", "a simile and a metaphor", "butter and margarine",
    "jam and marmalade", "a debit card and a credit card", "a shop and a store", "a stalactite and a stalagmite",
    "empathy and sympathy", "a cello and a double bass", "mass and weight", "speed and velocity",
    "an atom and a molecule", "a fruit and a vegetable", "a moth and a butterfly", "a turtle and a tortoise",
    "a lake and a pond", "a city and a town", "Great Britain and the United Kingdom", "Holland and the Netherlands",
    "socialism and communism", "a republic and a monarchy", "a senator and a governor", "civil and criminal law",
    "a cold and the flu", "a sprain and a fracture", "fat and muscle", "type 1 and type 2 diabetes",
    "a psychologist and a psychiatrist", "a nurse and a doctor", "baking soda and baking powder", "stock and broth",
    "an espresso and a filter coffee", "green tea and black tea", "red wine and white wine", "ale and lager",
    "a waltz and a tango", "classical music and pop music", "a novel and a novella", "fiction and non-fiction",
    "a biography and an autobiography", "affect and effect", "its and it's", "fewer and less", "who and whom",
    "a verb and a noun", "a colon and a semicolon", "a hypothesis and a theory", "a virus and a worm on a computer",
    "RAM and a hard disk", "Wi-Fi and mobile data", "HTTP and HTTPS", "Java and JavaScript",
    "a compiler and an interpreter", "a stack and a queue", "an array and a linked list", "a process and a thread",
    "machine learning and statistics", "supervised and unsupervised learning", "a set and a dictionary in Python",
    "git merge and git rebase", "a solar and a lunar eclipse", "a planet and a star", "renewable and fossil energy",
    "a hurricane and a tornado", "fog and clouds", "a glacier and an iceberg", "sand and soil",
    "a mammal and a reptile", "a monkey and an ape", "a donkey and a mule", "a leopard and a jaguar",
    "a pigeon and a dove", "oil paint and acrylic paint", "a violin and a viola", "tennis and badminton",
    "rugby and American football", "yoga and Pilates", "a triathlon and a decathlon", "income and profit",
    "a tax and a fee", "a loan and a lease", "a meeting and a workshop", "a manager and a leader",
    "marketing and advertising", "a brand and a product", "an introvert and a shy person", "envy and jealousy",
    "an ethic and a law", "deduction and induction",
)  # fmt: skip
_WHY = (
    "do dogs wag their tails", "do birds fly in a V", "do leaves change colour in autumn", "do we yawn",
    "do we dream", "do onions make us cry", "does ice float", "does metal feel colder than wood", "is grass green",
    "is blood red", "do stars twinkle", "does the moon have phases", "is Pluto not a planet any more",
    "are there time zones", "is there a leap year", "do boats float", "do magnets attract iron", "does bread rise",
    "does milk turn sour", "does popcorn pop", "do apples turn brown", "is honey so long-lived", "does salt melt ice",
    "do knuckles crack", "do babies cry", "do we get goose bumps", "do we forget things", "do we need sleep",
    "do muscles ache after sport", "do old people need glasses", "is laughter catching", "do people lie",
    "do people like sad songs", "do people move to cities", "do languages die out", "do prices rise", "do banks fail",
    "do wars begin", "do people vote", "did the Roman Empire fall", "did the dinosaurs die out",
    "did the Titanic sink", "did people build pyramids", "do zebras have stripes", "do flamingos stand on one leg",
    "do owls hunt at night", "do salmon swim upstream", "do bears sleep in winter", "do snakes shed their skin",
    "do camels have humps", "do spiders not stick to their webs", "do trees lose their leaves",
    "do cactuses have spines", "do volcanoes erupt", "is the desert cold at night", "are there no snakes in Ireland",
    "is Venice sinking", "is the Dead Sea so salty", "do golf balls have dimples", "are manhole covers round",
    "do keyboards begin with Q", "do computers use binary numbers", "do programs crash", "does a phone battery age",
    "is open source software free", "is the sum of two odd numbers even", "can we not divide by zero",
    "is pi irrational", "do planes leave white trails", "do mirrors swap left and right",
    "is the inside of a car so hot in the sun", "does hair turn grey", "do teeth hurt",
)  # fmt: skip
_WHO = (
    "discovered penicillin", "invented the telephone", "wrote The Odyssey", "was the first woman in space",
    "painted The Starry Night", "composed The Four Seasons", "was Cleopatra", "was Alan Turing", "was Ada Lovelace",
    "was Genghis Khan", "was Nelson Mandela", "was Rosa Parks", "was Frida Kahlo", "was Johann Sebastian Bach",
    "was Charles Darwin", "was Galileo", "was Leonardo da Vinci", "was Napoleon", "was Joan of Arc", "was Confucius",
    "was Socrates", "was Florence Nightingale", "was Nikola Tesla", "was Isaac Newton", "was Rosalind Franklin",
    "was Marco Polo", "was Amelia Earhart", "was Ernest Shackleton", "was Agatha Christie", "was Jane Austen",
    "was Emily Dickinson", "was Pablo Picasso", "was Claude Monet", "was Mahatma Gandhi", "was Abraham Lincoln",
    "was Queen Victoria", "was Simon Bolivar", "was Ludwig van Beethoven", "was Louis Armstrong", "was Buddha",
    "built the Great Wall of China", "wrote Don Quixote", "first reached the South Pole", "invented the light bulb",
)  # fmt: skip
_PLACES = (
    "Paris", "London", "Madrid", "Berlin", "Prague", "Vienna", "Athens", "Istanbul", "Cairo", "Marrakesh", "Nairobi",
    "Cape Town", "Mumbai", "Delhi", "Bangkok", "Singapore", "Tokyo", "Kyoto", "Seoul", "Beijing", "Sydney",
    "Auckland", "San Francisco", "Chicago", "Boston", "Mexico City", "Havana", "Lima", "Buenos Aires",
    "Rio de Janeiro", "Iceland", "Norway", "Scotland", "Ireland", "Portugal", "Greece", "Croatia", "Switzerland",
    "Poland", "Finland", "Canada", "Peru", "Vietnam", "Nepal", "Morocco", "Kenya", "Brazil", "New Zealand", "Hawaii",
    "Alaska", "Dublin", "Edinburgh",
)  # fmt: skip
_OF_PLACES = (
    "What should I see in {}?", "What is {} famous for?", "What is the best time of the year to visit {}?",
    "Plan three days in {}.", "What should I pack for a week in {}?", "What do people eat in {}?",
    "How many people live in {}?", "Which language is spoken in {}?", "Is {} expensive?",
    "Tell me about the history of {}.", "How do I get around in {} without a car?",
    "Is {} a good place for a family with small children?", "Write a postcard from {}.",
    "What should a tourist not do in {}?", "What is the weather like in {} in winter?",
    "Which museums are there in {}?", "Describe {} in three sentences.", "Where should I eat in {}?",
    "Write a short advertisement for a trip to {}.", "Compare {} and Rome.", "Is it safe to travel to {} alone?",
    "What souvenirs can I bring home from {}?", "What are the biggest problems of {}?",
    "Name a famous person from {}.",
)  # fmt: skip
_FORMS = (
    "a poem", "a short poem", "six lines", "a limerick", "a short story", "a fairy tale", "a scary story",
    "a dialogue", "a letter", "a diary entry", "a news report", "a blog post", "a short essay", "a song", "a toast",
    "a speech", "an advertisement", "a product review", "a tweet", "a joke", "a riddle", "a children's story",
    "a love letter", "a play with two roles", "a summary of what is known", "an introduction", "a paragraph",
    "a conversation between a teacher and a pupil", "three sentences", "two verses", "a fable", "a bedtime story",
)  # fmt: skip
_THEMES = (
    "the sea in winter", "a train that never arrives", "a robot that learns to paint", "an empty house",
    "the last apple", "my grandmother's kitchen", "a forgotten umbrella", "two brothers", "a city without cars",
    "the first snow", "a talking tree", "a lost letter", "the smell of bread", "a lazy cat", "a brave mouse",
    "the night train", "an astronaut who is homesick", "a baker and a thief", "the colour blue", "a broken mirror",
    "growing old", "a river that runs backwards", "the village school", "a stolen painting", "the end of summer",
    "a small garden", "a king who could not sleep", "the moon and the tide", "a wolf at the door", "a secret door",
    "an honest liar", "a storm at sea", "a shop that sells memories", "the price of gold",
    "a letter to my younger self", "moving house", "the importance of trees", "why reading matters", "healthy eating",
    "screen time", "working from home", "learning from mistakes", "public transport", "clean water", "animal rights",
    "the future of work", "teamwork", "space travel", "artificial intelligence", "social media", "fast fashion",
    "voting", "local food", "a good teacher", "money and happiness", "sport at school", "noise in cities",
    "travelling alone", "the value of friendship", "music",
)  # fmt: skip
_THINGS = (
    "photosynthesis", "the water cycle", "supply and demand", "interest rates", "the big bang", "evolution",
    "gravity", "plate tectonics", "the ozone layer", "the greenhouse effect", "an eclipse", "electricity",
    "a rainbow", "sound", "the immune system", "a vaccine", "an antibiotic", "blood pressure", "digestion",
    "the nervous system", "a gene", "a stock", "a bond", "a mortgage", "insurance", "bankruptcy",
    "gross domestic product", "a constitution", "a veto", "the United Nations", "the Cold War", "the Renaissance",
    "the Industrial Revolution", "the Reformation", "feudalism", "a sonnet", "irony", "a haiku", "a fable",
    "perspective in painting", "Impressionism", "a symphony", "a fugue", "encryption", "the cloud", "a search engine",
    "a blockchain", "a neural network", "an operating system", "a cookie", "a for loop", "recursion", "a function",
    "an object", "a hash table", "binary search", "a unit test", "an API", "Ohm's law", "Newton's second law",
    "the theorem of Pythagoras", "a logarithm", "a derivative", "probability", "the placebo effect", "a habit",
    "stress", "mindfulness", "intuition", "peer pressure", "a growth mindset", "karma", "a jet engine",
    "a refrigerator", "a touch screen", "a battery", "a solar cell", "a 3D printer", "GPS", "radar",
    "a hot-air balloon", "a submarine", "a dam", "a lighthouse", "a combustion engine", "a pacemaker", "an X-ray",
)  # fmt: skip
_OF_THINGS = (
    "What is {}?", "How does {} work?", "Explain {}.", "Explain {} in simple words.",
    "Explain {} to a child of eight.", "Explain {} in one paragraph.", "What does it mean when people speak of {}?",
    "Give me an example of {}.", "Why does {} matter?", "Write a quiz question about {} and answer it.",
    "What are common mistakes about {}?", "Summarise what one should know about {} in five points.",
    "Who came up with {}?", "Is {} hard to understand?", "Explain {} with a comparison from daily life.",
    "I have an exam about {}. What should I learn?",
)  # fmt: skip
_WANTS = (
    "three ideas for a healthy lunch", "five ideas for a first date", "three ideas for a school project about water",
    "ten ideas for a present for my father", "four ideas for a cheap holiday", "five names for a goldfish",
    "three names for a bakery", "five tips for a long drive", "three tips for a new manager",
    "five tips for beginners in chess", "four tips for growing herbs indoors", "three exercises for my back",
    "five exercises without equipment", "three games for a children's party", "five questions for a job interview",
    "ten words that rhyme with 'day'", "five adjectives that describe a good friend",
    "three synonyms for 'difficult'", "five books about the sea", "three films for a family evening",
    "five famous painters", "five inventions of the last century", "seven wonders of the world",
    "three reasons to learn Spanish", "three reasons to get up early", "five reasons to ride a bicycle to work",
    "two arguments for and two against school uniforms", "three arguments for a four-day week",
    "a recipe for tomato soup", "a recipe for chocolate biscuits", "a recipe for a vegan curry",
    "a recipe for apple pie", "a recipe for lemonade", "a plan for learning to code in three months",
    "a training plan for a beginner", "a menu for a dinner with four guests", "a packing list for the beach",
    "a checklist for moving house", "a shopping list for a week", "a riddle and its answer",
    "a fun fact about octopuses", "a fun fact about the moon", "a quotation about courage",
    "a motto for a sports club", "a short history of chocolate", "a short history of the bicycle",
    "a summary of Hamlet", "a summary of the plot of Frankenstein", "an outline for an essay about climate change",
    "a title for a book about bees", "a daily routine for a student", "a polite answer to a rude e-mail",
    "a birthday wish for a colleague", "a voicemail greeting", "a caption for a holiday photo",
)  # fmt: skip
_CHOICES = (
    "drink tea or coffee in the morning", "rent or buy a bicycle on holiday", "read in bed or at a desk",
    "study in the morning or at night", "learn the piano or the guitar first", "live in a city or in the country",
    "walk or run to stay healthy", "eat before or after sport", "pay by card or in cash",
    "take the train or the plane", "have one good friend or many", "work alone or in a team", "get a cat or a dog",
    "use paper or a screen for notes", "shower in the morning or in the evening", "buy new or used clothes",
    "cook with butter or with oil", "be honest or polite", "save or spend a bonus", "start a company or find a job",
    "write by hand or to type", "water plants in the morning or in the evening",
    "learn one language well or three a little", "lift weights or swim",
)  # fmt: skip
_LANGUAGES = (
    "Python", "Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Rust", "TypeScript",
)  # fmt: skip
_PROGRAMS = (
    "returns the largest of three numbers", "checks whether a number is even", "counts the vowels in a string",
    "reverses a list", "checks whether a word is a palindrome", "computes the sum of the digits of a number",
    "merges two sorted lists", "finds the second largest element of a list", "sorts a list of words by length",
    "returns the first n prime numbers", "computes the greatest common divisor of two numbers",
    "counts words in a text", "converts a number to binary", "converts minutes to hours and minutes",
    "computes the area of a rectangle", "reads a CSV file and prints its rows", "writes a list of names to a file",
    "finds the most common word in a text", "flattens a nested list", "removes all spaces from a string",
    "capitalises every word of a sentence", "checks whether brackets are balanced", "generates a random password",
    "rolls two dice", "simulates a coin toss", "computes the mean and the median of a list", "transposes a matrix",
    "multiplies two matrices", "prints a triangle of stars", "checks whether a year is a leap year",
    "computes the days between two dates", "prints the current date", "downloads a web page",
    "counts the lines of a file", "finds all files with a given extension", "groups words by first letter",
    "implements binary search", "implements bubble sort", "implements a queue", "implements a linked list",
    "parses a URL", "validates an e-mail address", "converts a Roman numeral",
    "computes compound interest on savings", "shuffles a list", "splits a list into chunks",
    "finds the longest word in a sentence", "swaps keys and values of a dictionary",
    "checks whether two lists have a common element", "plays rock, paper, scissors",
)  # fmt: skip
_CODING = (
    "Write a {language} function that {program}.", "Write a {language} program that {program}.",
    "Write a short {language} function that {program}, and explain it.",
    "Write a unit test for a {language} function that {program}.",
    "How do I write a function in {language} that {program}?",
    "Show me {language} code that {program}, with comments.",
    "I need a {language} function that {program}. What would it look like?",
)  # fmt: skip
_STARTS = (
    "", "", "", "", "", "", "Please tell me: ", "Hi! ", "Hello, ", "A quick question: ", "Be brief. ",
    "I am curious. ",
)  # fmt: skip


def question(noise: random.Random) -> str:
    """One whole user message."""
    kinds = (_how_to, _difference, _why, _who, _place, _text, _thing, _want, _choice, _code)
    return noise.choices(kinds, weights=(5, 2, 2, 1, 3, 4, 4, 2, 1, 4))[0](noise)


def _how_to(noise: random.Random) -> str:
    form = noise.choice((
        "How do I {}?", "How do I {}?", "How can I {}?", "What is the best way to {}?", "How do you {}?",
        "Give me three tips on how to {}.", "Explain step by step how to {}.", "I want to {}. Where do I start?",
        "What do I need in order to {}?", "How long does it take to {}?", "What mistakes do people make when they {}?",
        "Write short instructions: how to {}.", "My friend would like to {}. What would you tell her?",
    ))  # fmt: skip
    return noise.choice(_STARTS) + form.format(noise.choice(_HOW_TO))


def _difference(noise: random.Random) -> str:
    form = noise.choice(
        ("What is the difference between {}?", "Explain the difference between {}.", "How do {} differ?")
    )
    return noise.choice(_STARTS) + form.format(noise.choice(_PAIRS))


def _why(noise: random.Random) -> str:
    return noise.choice(_STARTS) + f"{noise.choice(('Why', 'Why', 'Why exactly'))} {noise.choice(_WHY)}?"


def _who(noise: random.Random) -> str:
    return f"Who {noise.choice(_WHO)}{noise.choice(('?', '?', ', and when?', ', and why do we remember it?'))}"


def _place(noise: random.Random) -> str:
    return noise.choice(_OF_PLACES).format(noise.choice(_PLACES))


def _text(noise: random.Random) -> str:
    return f"Write {noise.choice(_FORMS)} about {noise.choice(_THEMES)}."


def _thing(noise: random.Random) -> str:
    return noise.choice(_STARTS) + noise.choice(_OF_THINGS).format(noise.choice(_THINGS))


def _want(noise: random.Random) -> str:
    return f"{noise.choice(('Give me', 'Give me', 'I need', 'Can you give me', 'Suggest'))} {noise.choice(_WANTS)}."


def _choice(noise: random.Random) -> str:
    return f"{noise.choice(('Is it better to', 'Should I', 'Would you rather'))} {noise.choice(_CHOICES)}?"


def _code(noise: random.Random) -> str:
    form = noise.choice(_CODING)
    return form.format(language=noise.choice(_LANGUAGES), program=noise.choice(_PROGRAMS))
