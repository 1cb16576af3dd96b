/** Copies words, or shows them where a browser gives no access to the clipboard. */

/**
 * Copy words.
 *
 * @param words What to copy.
 * @param name What they are: "command" or "link".
 * @param dialog Shows them where the clipboard cannot be reached.
 * @param say Called with a sentence about what was done.
 */
export async function copy(words, name, dialog, say) {
  try {
    await navigator.clipboard.writeText(words);
    say(`The ${name} is copied.`);
  } catch {
    const text = dialog.querySelector("textarea");
    text.value = words;
    dialog.querySelector("h2").textContent = `Copy this ${name}`;
    dialog.showModal();
    text.select();
  }
}
