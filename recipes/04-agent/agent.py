"""A program behind the endpoint, as an example: it asks the model, calculates what the model asks for, and goes on.

The official clients of OpenAI and Anthropic do the same in fewer lines; importing one takes a second for each rollout.
"""

import json
import os
import re
import urllib.error
import urllib.request

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": SCHEMA}}]


def ask(messages):
    body = json.dumps({"model": "any", "messages": messages, "tools": TOOLS}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def calculate(call):
    product = re.fullmatch(r'\{"expression": "(\d+) ?\* ?(\d+)"\}', call["function"]["arguments"])
    return str(int(product[1]) * int(product[2])) if product else "write a product of two numbers"


with open(os.environ["RLHF_ROW"]) as file:
    messages = [{"role": "user", "content": json.load(file)["question"]}]
try:
    for _ in range(3):
        messages.append(ask(messages))
        calls = messages[-1].get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": calculate(call)} for call in calls]
        if not calls:
            break
except urllib.error.HTTPError:
    pass  # the context is full: the rollout is judged as it is
