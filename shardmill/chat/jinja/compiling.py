"""From the source of a template to code that asks the sandbox before it does anything.

Each loop body, macro and block of a call first pays for its own code. What Jinja's code does with
Python's own operators (`~`, `in`, comparisons, slices, keys, output) is done by the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from shardmill.errors import missing_extra

try:
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.compiler import CodeGenerator, operators
    from jinja2.ext import Extension
    from jinja2.filters import FILTERS
except ImportError as missing:
    raise missing_extra("jinja2", "hub") from missing

MAX_NODES = 10_000  # of the syntax tree; published templates: 1,250
MAX_NESTING = 100  # of the syntax tree, and of values; published: 22
MAX_BRACKETS = 20  # open at once; published: 4

_UNSUPPORTED: dict[type[nodes.Node], str] = {
    nodes.Import: "import",
    nodes.FromImport: "from",
    nodes.Include: "include",
    nodes.Extends: "extends",
    nodes.Block: "block",
    nodes.ScopedEvalContextModifier: "autoescape",
}
_COSTS: dict[type[nodes.Node], int] = {
    **dict.fromkeys((nodes.For, nodes.Macro, nodes.CallBlock), 16),
    **dict.fromkeys((nodes.List, nodes.Tuple, nodes.Dict, nodes.Call, nodes.Concat), 4),
    nodes.Filter: 8,
    **dict.fromkeys((nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow), 3),
    **dict.fromkeys((nodes.Getattr, nodes.Getitem, nodes.Test, nodes.Compare), 4),
}
"""Quarters of a step; every other node costs one."""
_SMALL_BRANCH = 16


def check_tree(tree: nodes.Template) -> None:
    found: list[tuple[nodes.Node, int]] = [(tree, 0)]
    for count, (node, depth) in enumerate(found):
        if type(node) in _UNSUPPORTED:
            tag = _UNSUPPORTED[type(node)]
            message = f"{{% {tag} %}} is not supported: a chat template is one file, without blocks"
            raise TemplateSyntaxError(message, node.lineno)
        if depth > MAX_NESTING or count > MAX_NODES:
            many = f"{MAX_NODES:,} parts, or {MAX_NESTING} inside each other"
            raise TemplateSyntaxError(f"the template has more than {many}", node.lineno)
        found += [(child, depth + 1) for child in node.iter_child_nodes()]


def computed_ahead(node: nodes.Node, found: list[nodes.Expr]) -> bool:
    """Whether Jinja may compute a node when it compiles, even where it never runs. `found`: the
    parts of it that can be large."""
    parts = [computed_ahead(part, found) for part in node.iter_child_nodes()]
    if isinstance(node, nodes.CondExpr | nodes.And | nodes.Or):
        parts = parts[:1]  # the others may not be looked at
    is_ahead = all(parts) and not isinstance(node, nodes.Name | nodes.NSRef | nodes.Call)
    if isinstance(node, nodes.Filter):
        is_ahead = is_ahead and node.node is not None and node.name in FILTERS
    if is_ahead and isinstance(node, _GROWING):
        found.append(node)
    return is_ahead


_GROWING = (nodes.Mul, nodes.Pow, nodes.Mod, nodes.Concat, nodes.Filter)


def _environment(name: str, *args: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def pay_for_bodies(node: nodes.Node, *, tell_loops: bool) -> int:
    """What a node costs when it runs once, in quarters of a step. What runs more often (the bodies
    of loops and macros) is made to pay for itself each time.

    tell_loops: whether each loop body also starts with `enter_loop`.
    """

    def together(parts: Iterable[nodes.Node]) -> int:
        return sum(pay_for_bodies(part, tell_loops=tell_loops) for part in parts)

    cost = _COSTS.get(type(node), 1)
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return cost + (len(node.value) >> 2)
    if isinstance(node, nodes.If):
        # What is seldom taken must not be paid for each time: some published templates look for a
        # message in a loop over all others, and skip the rest of the body once they found it.
        for branch in (node.body, node.else_):
            inside = together(branch)
            if inside > _SMALL_BRANCH:
                pay_here = nodes.ExprStmt(_environment("spend", nodes.Const(inside >> 2)))
                branch.insert(0, pay_here.set_lineno(node.lineno))
            else:
                cost += inside
        return cost + together([node.test, *node.elif_])
    if not isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
        return cost + together(node.iter_child_nodes())
    cost += together(node.iter_child_nodes(exclude=("body", "defaults", "test")))
    each = together(node.body)
    if isinstance(node, nodes.For):
        node.iter = _environment("looped", node.iter)
    first: list[nodes.Node] = []
    if not isinstance(node, nodes.For):
        each += together(node.defaults)
    elif node.test is not None:
        # Items that the test rejects never reach the body.
        pay = _environment("spend", nodes.Const(1 + (together([node.test]) >> 2)))
        node.test = nodes.And(pay, node.test).set_lineno(node.lineno)
    if isinstance(node, nodes.For) and tell_loops:
        value = (
            nodes.Name(node.target.name, "load") if isinstance(node.target, nodes.Name) else None
        )
        first = [nodes.Output([_environment("enter_loop", value or nodes.Const(None))])]
    first = [nodes.ExprStmt(_environment("spend", nodes.Const(max(each >> 2, 1)))), *first]
    node.body[:0] = [part.set_lineno(node.lineno) for part in first]
    return cost


class Generation(Extension):
    """`{% generation %}`, which marks what is trained; and a limit that the parser needs."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(_environment("generation"), [], [], body).set_lineno(line)

    def filter_stream(self, stream: Any) -> Iterator[Any]:
        depth = 0
        for token in stream:
            if token.type in ("lparen", "lbracket", "lbrace"):
                depth += 1
            elif token.type in ("rparen", "rbracket", "rbrace"):
                depth -= 1
            if depth > MAX_BRACKETS:
                message = f"more than {MAX_BRACKETS} brackets are open at once"
                raise TemplateSyntaxError(message, token.lineno)
            yield token


class SandboxCode(CodeGenerator):
    """Leads to the sandbox what Jinja's own code does without asking it."""

    def _visit_between(self, parts: Iterable[nodes.Node | str], frame: Any) -> None:
        for part in parts:
            if isinstance(part, str):
                self.write(part)
            else:
                self.visit(part, frame)

    def visit_Call(self, node: nodes.Call, frame: Any, forward_caller: bool = False) -> None:  # noqa: N802
        if isinstance(node.node, nodes.EnvironmentAttribute):  # ours: templates cannot write it
            self._visit_between([node.node, "(", *node.args], frame)
            self.write("caller=caller)" if forward_caller else ")")
            return
        self._visit_between(["environment.call(context, ", node.node], frame)
        self.signature(node, frame, {"caller": "caller"} if forward_caller else None)
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Any) -> None:  # noqa: N802
        operands = [node.right]
        left = node.left
        while isinstance(left, nodes.Add):
            operands.append(left.right)
            left = left.left
        self._visit_between(["environment.add(context, ", left], frame)
        for operand in reversed(operands):
            self._visit_between([", ", operand], frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.concat_operands((")
        for part in node.nodes:
            self._visit_between([part, ", "], frame)
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Any) -> None:  # noqa: N802
        # `a < b in c` is `a < (t := b) and t in c`.
        self.write("(")
        left: nodes.Node | str = node.expr
        for at, operand in enumerate(node.ops):
            name = self.temporary_identifier() if at + 1 < len(node.ops) else ""
            right = [f"({name} := ", operand.expr, ")"] if name else [operand.expr]
            if operand.op in ("in", "notin"):
                no = "not " if operand.op == "notin" else ""
                parts = [f"{no}environment.contains(", left, ", ", *right, ")"]
            elif isinstance(left, nodes.Const) or isinstance(operand.expr, nodes.Const):
                parts = [left, f" {operators[operand.op]} ", *right]  # as cheap as the constant
            else:
                parts = ["environment.weighed(", left, f") {operators[operand.op]} ", *right]
            self._visit_between([" and " if at else "", *parts], frame)
            left = name
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        self._visit_between(["environment.getitem(", node.node, ", "], frame)
        if isinstance(node.arg, nodes.Slice):
            for before, part in zip(
                ("slice(", ", ", ", "), (node.arg.start, node.arg.stop, node.arg.step), strict=True
            ):
                self._visit_between([before, "None" if part is None else part], frame)
            self.write("))")
        else:
            self._visit_between([node.arg, ")"], frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self.write("{")
        for pair in node.items:
            self._visit_between(["environment.key(", pair.key, "): ", pair.value, ", "], frame)
        self.write("}")

    def visit_AssignBlock(self, node: nodes.AssignBlock, frame: Any) -> None:  # noqa: N802
        if isinstance(node.target, nodes.NSRef):
            # Jinja forgets this check, so `{% set message.content %}` would change the messages.
            name = frame.symbols.ref(node.target.name)
            self.writeline(f"if not isinstance({name}, Namespace):", node)
            self.indent()
            self.writeline('raise TypeError("only a namespace has attributes that can be set")')
            self.outdent()
        super().visit_AssignBlock(node, frame)

    def visit_Neg(self, node: nodes.UnaryExpr, frame: Any) -> None:  # noqa: N802
        if isinstance(node.node, nodes.Const) and type(node.node.value) in (int, float):
            self._visit_between(["(-", node.node, ")"], frame)
        else:
            self._visit_between(["environment.call_unop(context, '-', ", node.node, ")"], frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if type(node) not in (nodes.TemplateData, nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:  # noqa: ARG002
        self.write("environment.written(")
