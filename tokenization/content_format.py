"""Does a chat template walk over the parts of a message's content, or does it want a plain string?

The engine decides this from the template's syntax tree and flattens content arrays for templates that want strings
(`"\\n"` between text parts), so the answer changes the prompt. Rule (vLLM 0.32, `renderers/hf.py`): the template is
"openai" if some loop runs over the content of an element of `messages`, over a variable called `content` outside of
macros, or over a macro parameter that is given a message's content; else it is "string".
"""

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "openai"]


def content_format(tree: nodes.Template) -> ContentFormat:
    """The content format the engine would use with this template, given its parsed form."""
    elements = _message_variables(tree)
    inside_macros = {id(loop) for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    macro_loops = {
        id(loop): parameters
        for macro in tree.find_all(nodes.Macro)
        if (parameters := _content_parameters(tree, macro, elements))
        for loop in macro.find_all(nodes.For)
    }
    for loop in tree.find_all(nodes.For):
        if any(_refers_to(loop.iter, name, "content") for name in elements):
            return "openai"
        if isinstance(loop.iter, nodes.Name):
            if loop.iter.name in macro_loops.get(id(loop), ()):
                return "openai"
            if loop.iter.name == "content" and id(loop) not in inside_macros:
                return "openai"
    return "string"


def _message_variables(tree: nodes.Template) -> set[str]:
    """Names of loop variables that run over `messages` or over something assigned from it."""
    lists = {"messages"}
    while True:
        found = {
            name
            for assign in tree.find_all(nodes.Assign)
            if any(_refers_to(assign.node, known) for known in lists)
            for name in _names(assign.target)
        }
        if found <= lists:
            break
        lists |= found
    return {
        name
        for loop in tree.find_all(nodes.For)
        if any(_refers_to(loop.iter, known) for known in lists)
        for name in _names(loop.target)
    }


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, elements: set[str]) -> set[str]:
    """The parameters of `macro` that some call gives a message's content."""
    parameters: set[str] = set()
    own = [argument.name for argument in macro.args]
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(own, call.args, strict=False), *((keyword.key, keyword.value) for keyword in call.kwargs)]
        parameters |= {
            name
            for name, value in given
            if name in own and any(_refers_to(value, element, "content") for element in elements)
        }
    return parameters


def _names(target: nodes.Node) -> Iterator[str]:
    if isinstance(target, nodes.Name):
        yield target.name


def _refers_to(node: nodes.Node | None, variable: str, key: str | None = None) -> bool:
    """Whether `node` is `variable` (or `variable.key`), maybe sliced, filtered or tested."""
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            break
    if key is not None:
        by_name = isinstance(node, nodes.Getattr) and node.attr == key
        by_index = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == key
        if not (by_name or by_index):
            return False
        node = node.node  # type: ignore[union-attr]
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == variable
