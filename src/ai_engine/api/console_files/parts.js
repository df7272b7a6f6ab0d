// What a request's parts are called and coloured.

export const COLOUR = {
  receive: "wire", contract: "wire", encode_wait: "queue", template: "text", tokenise: "text", handover: "wire", submit: "wire",
  first_token: "queue", queue: "queue", prefill: "prefill", decode: "decode", detokenise: "text", send: "wire",
};

export const colour = (name) => `c-${COLOUR[name] ?? "other"}`;

export function opColour(op) {
  if (op === "matmul") return "c-matmul";
  if (op.includes("attention")) return "c-attention";
  if (op.includes("sample")) return "c-sample";
  return /norm|rope|quant|embed|silu|gelu|glu/.test(op) ? "c-norm" : "c-other";
}
