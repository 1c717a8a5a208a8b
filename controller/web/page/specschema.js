// What may stand at a place of a job spec, by its JSON schema.

/** The schemas that a value may be of, with references followed. */
function variants(schema, node) {
  if (!node) return [];
  if (node.$ref) return variants(schema, schema.$defs[node.$ref.split("/").pop()]);
  const choices = node.anyOf ?? node.oneOf ?? node.allOf;
  return choices ? choices.flatMap((each) => variants(schema, each)) : [node];
}

/** Of a section, or of each entry of a list of sections. */
function propertiesOf(schema, node) {
  const found = {};
  for (const each of variants(schema, node)) {
    const inside = each.type === "array" ? propertiesOf(schema, each.items) : (each.properties ?? {});
    Object.assign(found, inside);
  }
  return found;
}

/** The schema of a field; undefined where there is none. */
export function nodeAt(schema, path) {
  return path.reduce((node, name) => node && propertiesOf(schema, node)[name], schema);
}

function kindOf(schema, node) {
  const kinds = variants(schema, node).map((each) => {
    if (each.enum) return "one of these";
    if (each.const !== undefined) return JSON.stringify(each.const);
    if (each.type === "array") return `list of ${kindOf(schema, each.items) || "values"}`;
    if (each.type === "object") return each.properties ? "section" : "mapping";
    return { null: "null", integer: "whole number", number: "number", string: "text", boolean: "true or false" }[each.type] ?? "value";
  });
  return [...new Set(kinds)].join(" or ");
}

function limitsOf(schema, node) {
  const limits = variants(schema, node).flatMap((each) => [
    each.minimum !== undefined && `${each.minimum} or more`,
    each.exclusiveMinimum !== undefined && `above ${each.exclusiveMinimum}`,
    each.maximum !== undefined && `up to ${each.maximum}`,
    each.exclusiveMaximum !== undefined && `below ${each.exclusiveMaximum}`,
  ]);
  return [...new Set(limits.filter(Boolean))].join(", ");
}

const MOST_OF_DEFAULT = 60;

function defaultOf(node) {
  if (node.default === undefined) return "";
  const text = JSON.stringify(node.default);
  return text.length > MOST_OF_DEFAULT ? "" : text;
}

/** Values that may be completed. */
function valuesOf(schema, node) {
  const values = variants(schema, node).flatMap((each) => {
    const own = each.type === "array" ? (each.items?.enum ?? []) : (each.enum ?? (each.const === undefined ? [] : [each.const]));
    if (each.type === "boolean") return [true, false];
    return each.type === "null" ? [null] : own;
  });
  return [...new Set(values.map(String))];
}

/** A field in words: its kind, limits, default, allowed values, and what it is for. */
export function described(schema, path) {
  const node = nodeAt(schema, path);
  if (!node || path.length === 0) return null;
  return {
    name: path.join("."),
    kind: [kindOf(schema, node), limitsOf(schema, node)].filter(Boolean).join(", "),
    byDefault: defaultOf(node),
    values: valuesOf(schema, node).filter((each) => each !== "null"),
    what: node.description ?? variants(schema, node)[0]?.description ?? "",
  };
}

/** What may be written at a place, `{text, label, hint}`: names not yet there, or values. */
export function completions(schema, place, written, fields) {
  const typed = written.toLowerCase();
  const fits = (name) => name.toLowerCase().startsWith(typed) && name.toLowerCase() !== typed;
  if (place.isValue) {
    const node = nodeAt(schema, place.path);
    return node ? valuesOf(schema, node).filter(fits).map((value) => ({ text: value, label: value, hint: "" })) : [];
  }
  const node = nodeAt(schema, place.path);
  if (!node) return [];
  const there = new Set(fields.map((each) => each.path.join("\n")));
  const isList = variants(schema, node).some((each) => each.type === "array");
  return Object.entries(propertiesOf(schema, node))
    .filter(([name]) => fits(name) && (isList || !there.has([...place.path, name].join("\n"))))
    .map(([name, each]) => ({ text: `${name}: `, label: name, hint: kindOf(schema, each) }));
}
