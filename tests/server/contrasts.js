() => {
  const channels = (colour) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => channels(colour).slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const groundOf = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const style = getComputedStyle(each);
      const ground = each instanceof SVGGElement ? style.getPropertyValue("--colour") : style.backgroundColor;
      if (ground && channels(ground)[3] === 255) return ground;
    }
  };
  const found = [];
  let texts = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const shown = walker.currentNode.data.trim() && node.checkVisibility();
    if (!shown || node.closest("[aria-disabled=true], .hidden")) continue;
    texts += 1;
    const style = getComputedStyle(node);
    const text = luminance(node instanceof SVGElement ? style.fill : style.color);
    const ground = luminance(groundOf(node));
    const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${node.outerHTML.slice(0, 100)}`);
  }
  return [texts, found];
}
