"""Prompts by kind that no shipped draft was trained on: they were written for this file only."""

from __future__ import annotations

_HARBOUR = (
    "The ferry company announced on Tuesday that it will stop its evening service between the harbour and the two "
    "outer islands from October. A spokesman said that on most evenings fewer than nine passengers were on board, "
    "while the cost of fuel had doubled within three years. The mayor of the larger island called the decision a "
    "disaster for pupils who attend the evening school on the mainland, and asked the county to pay half of the "
    "losses. A decision is expected before the end of the month."
)
_BEES = (
    "Honey bees tell each other where food is by dancing. A bee that has found flowers runs in a straight line on the "
    "comb, waggles her body, and circles back to begin again. The angle of the line tells the direction of the flowers "
    "with respect to the sun, and the length of the waggle tells how far away they are. Other bees follow the dancer "
    "closely, touch her with their antennae, and then fly out to look for the place themselves."
)
_MINUTES = (
    "Anna opened the meeting at nine and said that the new printer is still broken. Boris has called the supplier "
    "twice; they will send somebody on Thursday. Carla asked who will order paper for the workshop. Boris offered to "
    "do it by Friday. Anna reminded everybody that holiday requests for the summer must be in her hands by the end of "
    "March. Carla will present the figures of the first quarter at the next meeting, which is on 14 April at ten."
)
_LETTER = (
    "hi mr olsen, i am writting to you becuase the heater in my flat dont work since sunday and it are very cold. i "
    "have call the office two time but nobody have answer. can you please send some one this week? i am at home every "
    "day after five oclock. thank you for you help, maria from number 12"
)
_INVOICE = """def total(items):
    sum = 0
    for item in items:
        if item["taxed"]:
            sum = sum + item["price"] * item["count"] * 1.2
        else:
            sum = sum + item["price"] * item["count"]
    return sum
"""
_STACK = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""
_PRIMES = """def primes(limit):
    found = []
    for number in range(2, limit):
        for divisor in found:
            if number % divisor == 0:
                break
        else:
            found.append(number)
    return found
"""
_SHAPES = """class Rectangle:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def perimeter(self):
        return 2 * (self.width + self.height)
"""
_CART = """function addToCart(cart, product, count) {
  for (const line of cart.lines) {
    if (line.product === product) {
      line.count += count;
      return cart;
    }
  }
  cart.lines.push({ product: product, count: count });
  return cart;
}
"""
_ORDERS = """SELECT customers.name, orders.number, orders.total
FROM orders
JOIN customers ON customers.id = orders.customer
WHERE orders.total > 100
ORDER BY orders.total;
"""

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What should I see if I have only one day in Lisbon?",
        "How do I get a red wine stain out of a white shirt?",
        "Why do cats purr?",
        "My neighbour plays loud music at night. What can I say to him?",
        "Which vegetables can I plant in April?",
        "Explain compound interest to a twelve-year-old.",
        "Write four lines about an old clock.",
        "What is the difference between weather and climate?",
        "Give me three ideas for a rainy Sunday with children.",
        "Is it better to stretch before or after a run?",
        "How does a microwave oven heat food?",
        "Who painted the Mona Lisa, and where is it now?",
    ),
    "code": (
        "Write a Python function that returns True if two words are anagrams.",
        "Write a Python function that removes duplicates from a list but keeps the order.",
        "Write a Python function that converts a temperature from Celsius to Fahrenheit and back.",
        "Rename the variable `sum` to `amount` in this code and print the whole code:\n\n" + _INVOICE,
        "Add a method `peek` to this class and print the whole class:\n\n" + _STACK,
        "Explain line by line what this code does:\n\n" + _INVOICE,
        "Write a JavaScript function that reverses the words in a sentence.",
        "Write an SQL query that counts the orders of each customer in 2023.",
        "Write type hints for this class and print it again:\n\n" + _STACK,
        "Write a Python loop that prints the multiplication table up to 5.",
        "How do I read a JSON file in Python?",
        "Write a Python class `Account` with the methods deposit and withdraw.",
    ),
    "edit": (
        "Rename the function `primes` to `primes_below` in this code and print the whole code:\n\n" + _PRIMES,
        "Rename the variable `found` to `result` in this code and print the whole code:\n\n" + _PRIMES,
        "Add a docstring to each method of this class and print the whole class:\n\n" + _SHAPES,
        "Add a method `is_square` to this class and print the whole class:\n\n" + _SHAPES,
        "Rename `line` to `entry` in this code and print the whole code:\n\n" + _CART,
        "Make this function refuse a negative `count` and print the whole function:\n\n" + _CART,
        "Change this query so that it sorts by the name of the customer, and print the whole query:\n\n" + _ORDERS,
        "Change the tax of this code from 1.2 to 1.25 and print the whole code:\n\n" + _INVOICE,
    ),
    "summarise": (
        "Summarise this news in two sentences:\n\n" + _HARBOUR,
        "Write a headline and one sentence for this news:\n\n" + _HARBOUR,
        "Summarise this text for a child:\n\n" + _BEES,
        "List the key facts of this text:\n\n" + _BEES,
        "Who has to do what, and by when?\n\n" + _MINUTES,
        "Shorten these minutes to three sentences:\n\n" + _MINUTES,
        "Correct all mistakes in this letter and write it again:\n\n" + _LETTER,
        "Repeat this text word for word:\n\n" + _BEES,
    ),
}
