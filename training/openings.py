"""First words of user turns, for models that always begin their questions in the same way.

Left alone, the demo target opens a third of its questions with "Can you" and another third with "I'm": it asks for
advice and little else, and heads that learn from that alone draft worse for everything else. A few words decide what
kind of request follows, and the model writes the rest. They name kinds of requests, not topics.
"""

from __future__ import annotations

OPENINGS: tuple[str, ...] = (
    # prose
    "Write a short story about", "Write a poem about", "Write a blog post about", "Write a formal letter to",
    "Write an email to", "Write a product description for", "Write a speech for", "Write a dialogue between",
    "Write a review of", "Draft an announcement", "Compose a song about", "Create a character who",
    "Continue this story:", "Describe a scene in which", "Describe the taste of", "Invent a legend that explains",
    "Give me a title for", "Come up with a slogan for",
    # to change a text that is given
    "Rewrite the following sentence", "Rewrite this paragraph in a friendlier tone:",
    "Correct the grammar of this text:", "Summarize the following article:", "Summarize this text in one sentence:",
    "Summarize the plot of", "Paraphrase this:", "Shorten this email:", "Translate this sentence into",
    "Turn these notes into", "Extract all names and dates from this text:",
    "List the main points of the following text:", "Make a table of", "Convert this list to JSON:",
    "Classify the following reviews as positive or negative:", "Read this passage and answer the question below.",
    "Based on the following text, answer the question:", "Here is a news report:",
    "Here is a paragraph from a book:",
    # facts
    "What is", "What are", "What is the difference between", "What causes", "What happens when",
    "What does the word", "Who was", "Who invented", "When did", "Where does", "Where can", "Why do", "Why is",
    "Why did", "How does", "How do", "How many", "How much", "How long does it take to", "Which", "Is it true that",
    "Define", "Name three", "Name the largest", "Tell me about", "Give me facts about",
    # explanations
    "Explain", "Explain how", "Explain why", "Explain to a child", "Explain the concept of", "Compare",
    "Compare and contrast", "Discuss the advantages and disadvantages of", "Analyze", "Describe the process of",
    "Describe the history of", "Describe the structure of", "Outline the causes of", "Give an overview of",
    "Evaluate the claim that", "Argue for or against", "Should",
    # numbers and reasoning
    "Solve", "Calculate", "Solve the equation", "Find the value of", "If a train", "If", "A shop sells",
    "A farmer has", "There are", "Suppose that", "Simplify the expression", "What is the probability that",
    "Convert", "Prove that", "Three friends", "You have", "Complete the sequence:",
    "Which of these is the odd one out:", "Solve this riddle:",
    # code
    "Write a Python function that", "Write a Python program to", "Write a JavaScript function that",
    "Write a SQL query that", "Write a C++ program that", "Write a regular expression that", "Write an HTML page",
    "Implement", "What does this code do?", "Fix the bug in this code:", "Explain this error message:", "How do I",
    "Optimize",
    # roles
    "Imagine you are", "You are", "Pretend to be", "Act as", "Suppose you are a teacher.", "As a doctor,",
    "As a historian,", "Answer like", "Let's play",
    # plans and advice
    "Give me", "Give me five ideas for", "Give advice to someone who", "Suggest", "Recommend", "List", "List ten",
    "List the steps to", "Plan", "Create a plan for", "Make a checklist for", "Design", "Propose", "Help me",
    "Teach me", "I want to", "I have", "My", "We are", "Do you", "Does", "Are", "Hello!", "Hi,", "Please",
)  # fmt: skip
