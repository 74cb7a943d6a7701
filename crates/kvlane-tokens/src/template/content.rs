//! Detects whether a template expects message contents as text or as lists of parts, with vLLM's rule
//! (`renderers/hf.py`, `_detect_content_format` of vLLM 0.32): it expects parts if it loops over a message's content,
//! or over something that may be one.
//!
//! This needs the template's syntax tree, which minijinja provides under `unstable_machinery`: another release may
//! change it, and then this does not compile. A separate parser could differ from the one that renders.

use minijinja::machinery::{ast, parse};
use minijinja::syntax::SyntaxConfig;

use crate::source::ContentFormat;

use ast::{CallArg, Expr, Stmt};

/// The elements of a template that the detection needs.
#[derive(Default)]
struct Found<'a> {
    /// `set` statements: target and value. The target is `None` unless it is a plain name.
    sets: Vec<(Option<&'a str>, &'a Expr<'a>)>,
    /// Loops: target, iterated expression, and enclosing macro.
    loops: Vec<(Option<&'a str>, &'a Expr<'a>, Option<usize>)>,
    /// Macros: name and parameter names.
    macros: Vec<(&'a str, Vec<&'a str>)>,
    /// Calls by a plain name.
    calls: Vec<(&'a str, &'a [CallArg<'a>])>,
}

/// The format that `source` expects; text if it cannot be determined.
pub(super) fn format(source: &str) -> ContentFormat {
    let Ok(template) = parse(source, "chat", SyntaxConfig::default()) else {
        return ContentFormat::String;
    };
    let mut found = Found::default();
    found.statement(&template, None);
    if found.loops_over_content() { ContentFormat::OpenAi } else { ContentFormat::String }
}

/// Whether `expr` is the variable, or its `key` if given, under any filters, tests and slices.
fn reaches(expr: &Expr<'_>, name: &str, key: Option<&str>) -> bool {
    match expr {
        Expr::Filter(filter) => filter.expr.as_ref().is_some_and(|inner| reaches(inner, name, key)),
        Expr::Test(test) => reaches(&test.expr, name, key),
        Expr::Slice(slice) => reaches(&slice.expr, name, key),
        Expr::Var(var) => key.is_none() && var.id == name,
        Expr::GetAttr(attr) => {
            key == Some(attr.name) && matches!(&attr.expr, Expr::Var(var) if var.id == name)
        }
        Expr::GetItem(item) => {
            key.is_some()
                && matches!(&item.subscript_expr, Expr::Const(index) if index.value.as_str() == key)
                && matches!(&item.expr, Expr::Var(var) if var.id == name)
        }
        _ => false,
    }
}

// === impl Found ===

impl<'a> Found<'a> {
    fn loops_over_content(&self) -> bool {
        // Names of the message list: `messages`, and all variables set from it.
        let mut lists = vec!["messages"];
        let mut next = 0;
        while let Some(&list) = lists.get(next) {
            for (target, value) in &self.sets {
                if reaches(value, list, None) {
                    match target {
                        Some(target) if !lists.contains(target) => lists.push(target),
                        Some(_) => {}
                        // vLLM stops here and uses text.
                        None => return false,
                    }
                }
            }
            next += 1;
        }
        let messages: Vec<&str> = self
            .loops
            .iter()
            .filter(|(_, over, _)| lists.iter().any(|list| reaches(over, list, None)))
            .filter_map(|(target, _, _)| *target)
            .collect();
        let is_content =
            |expr: &Expr<'_>| messages.iter().any(|message| reaches(expr, message, Some("content")));

        // Macro parameters that receive a message's content in some call.
        let takes_content = |name: &str, parameters: &[&str], parameter: &str| {
            self.calls.iter().filter(|(called, _)| *called == name).any(|(_, args)| {
                args.iter().enumerate().any(|(at, arg)| match arg {
                    CallArg::Pos(value) => parameters.get(at) == Some(&parameter) && is_content(value),
                    CallArg::Kwarg(key, value) => *key == parameter && is_content(value),
                    _ => false,
                })
            })
        };
        self.loops.iter().any(|(_, over, within)| {
            if is_content(over) {
                return true;
            }
            let Expr::Var(var) = over else { return false };
            match within {
                Some(within) => {
                    let (name, parameters) = &self.macros[*within];
                    parameters.contains(&var.id) && takes_content(name, parameters, var.id)
                }
                None => var.id == "content",
            }
        })
    }

    fn statements(&mut self, statements: &'a [Stmt<'a>], within: Option<usize>) {
        for statement in statements {
            self.statement(statement, within);
        }
    }

    fn statement(&mut self, statement: &'a Stmt<'a>, within: Option<usize>) {
        match statement {
            Stmt::Template(template) => self.statements(&template.children, within),
            Stmt::EmitExpr(emit) => self.expr(&emit.expr),
            Stmt::ForLoop(each) => {
                self.loops.push((plain(&each.target), &each.iter, within));
                self.expr(&each.iter);
                if let Some(filter) = &each.filter_expr {
                    self.expr(filter);
                }
                self.statements(&each.body, within);
                self.statements(&each.else_body, within);
            }
            Stmt::IfCond(cond) => {
                self.expr(&cond.expr);
                self.statements(&cond.true_body, within);
                self.statements(&cond.false_body, within);
            }
            Stmt::WithBlock(with) => {
                for (_, value) in &with.assignments {
                    self.expr(value);
                }
                self.statements(&with.body, within);
            }
            Stmt::Set(set) => {
                self.sets.push((plain(&set.target), &set.expr));
                self.expr(&set.expr);
            }
            Stmt::SetBlock(set) => self.statements(&set.body, within),
            Stmt::AutoEscape(block) => self.statements(&block.body, within),
            Stmt::FilterBlock(block) => self.statements(&block.body, within),
            Stmt::Block(block) => self.statements(&block.body, within),
            Stmt::Macro(declared) => self.macro_body(declared),
            Stmt::CallBlock(block) => {
                self.call(&block.call);
                self.macro_body(&block.macro_decl);
            }
            Stmt::Do(call) => self.call(&call.call),
            _ => {}
        }
    }

    fn macro_body(&mut self, declared: &'a ast::Macro<'a>) {
        self.macros.push((declared.name, declared.args.iter().filter_map(plain).collect()));
        let within = Some(self.macros.len() - 1);
        self.statements(&declared.body, within);
    }

    fn call(&mut self, call: &'a ast::Call<'a>) {
        if let Expr::Var(var) = &call.expr {
            self.calls.push((var.id, &call.args));
        } else {
            self.expr(&call.expr);
        }
        self.args(&call.args);
    }

    fn args(&mut self, args: &'a [CallArg<'a>]) {
        for arg in args {
            match arg {
                CallArg::Pos(value) | CallArg::Kwarg(_, value) => self.expr(value),
                CallArg::PosSplat(value) | CallArg::KwargSplat(value) => self.expr(value),
            }
        }
    }

    /// Calls may occur anywhere in an expression.
    fn expr(&mut self, expr: &'a Expr<'a>) {
        match expr {
            Expr::Var(_) | Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expr(&slice.expr);
                for bound in [&slice.start, &slice.stop, &slice.step].into_iter().flatten() {
                    self.expr(bound);
                }
            }
            Expr::UnaryOp(op) => self.expr(&op.expr),
            Expr::BinOp(op) => {
                self.expr(&op.left);
                self.expr(&op.right);
            }
            Expr::Compare(compare) => {
                self.expr(&compare.expr);
                for op in &compare.ops {
                    self.expr(&op.expr);
                }
            }
            Expr::IfExpr(cond) => {
                self.expr(&cond.test_expr);
                self.expr(&cond.true_expr);
                if let Some(other) = &cond.false_expr {
                    self.expr(other);
                }
            }
            Expr::Filter(filter) => {
                if let Some(inner) = &filter.expr {
                    self.expr(inner);
                }
                self.args(&filter.args);
            }
            Expr::Test(test) => {
                self.expr(&test.expr);
                self.args(&test.args);
            }
            Expr::GetAttr(attr) => self.expr(&attr.expr),
            Expr::GetItem(item) => {
                self.expr(&item.expr);
                self.expr(&item.subscript_expr);
            }
            Expr::Call(call) => self.call(call),
            Expr::List(list) => {
                for item in &list.items {
                    self.expr(item);
                }
            }
            Expr::Tuple(tuple) => {
                for item in &tuple.items {
                    self.expr(item);
                }
            }
            Expr::Map(map) => {
                for item in map.keys.iter().chain(&map.values) {
                    self.expr(item);
                }
            }
        }
    }
}

fn plain<'a>(expr: &Expr<'a>) -> Option<&'a str> {
    match expr {
        Expr::Var(var) => Some(var.id),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, expect: ContentFormat) {
        assert_eq!(format(source), expect, "{source}");
    }

    #[test]
    fn a_template_that_prints_contents_wants_text() {
        check("{% for m in messages %}{{ m['content'] }}{% endfor %}", ContentFormat::String);
        check("{% for t in tools %}{{ t }}{% endfor %}", ContentFormat::String);
        check("{% if %}", ContentFormat::String);
    }

    #[test]
    fn a_template_that_loops_over_contents_wants_parts() {
        for source in [
            "{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% for p in m.content | list %}{{ p.text }}{% endfor %}{% endfor %}",
            "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}",
            "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ '<' + show(m.content) }}{% endfor %}",
            "{% macro show(x) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}\
             {% for m in messages %}{{ show(x=m['content']) }}{% endfor %}",
        ] {
            check(source, ContentFormat::OpenAi);
        }
    }

    #[test]
    fn a_macro_counts_only_if_it_is_given_a_content() {
        let show = "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}";
        check(
            &format!("{show}{{% for m in messages %}}{{{{ show(m.name) }}}}{{% endfor %}}"),
            ContentFormat::String,
        );
        check(&format!("{show}{{{{ show(messages[0]['content']) }}}}"), ContentFormat::String);
    }
}
