// How numbers and names are said.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);
export const items = (number) => `${count(number)} ${number === 1 ? "item" : "items"}`;

/** A probability or a share, never rounded to certainty. */
export function percent(share) {
  if (share > 0 && share < 0.001) return "<0.1\u00a0%";
  if (share > 0 && share < 0.0995) return `${(share * 100).toFixed(1)}\u00a0%`;
  if (share < 1 && share >= 0.995) return ">99\u00a0%";
  return `${Math.round(share * 100)}\u00a0%`;
}

export function milliseconds(number) {
  if (number >= 1000) return `${(number / 1000).toFixed(1)} s`;
  return number < 10 ? `${number.toFixed(1)} ms` : `${Math.round(number)} ms`;
}

const ONE = { image: "Picture", text: "Text", "image-text": "Picture and text" };
const MANY = { image: "Pictures", text: "Texts", "image-text": "Picture and text" };
export const modalityName = (modality) => ONE[modality] ?? modality;
export const modalityNames = (modality) => MANY[modality] ?? modality;

/** What to call an item where its picture cannot be seen. */
export function itemName(item) {
  return item.text ? (item.text.length > 80 ? `${item.text.slice(0, 77)}…` : item.text) : `Picture ${item.id}`;
}
